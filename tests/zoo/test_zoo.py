"""Public architectures and awkward ones, tiny and in float64: in shards and in stages they end with the weights of a
plain loop, and they are pruned and dealt out.

`make test` runs a selection, `make zoo` all of them, and `make zoo MODELS="CLIP;T5"` some; both write docs/models.md.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

import hydra_tune as ht
from hydra_tune.core.errors import CandidateError
from hydra_tune.core.seeds import seed_everything
from hydra_tune.core.trees import call_model
from hydra_tune.strategies.pipeline.strategy import Pipeline
from hydra_tune.strategies.sparse.pruning import Pruning
from hydra_tune.strategies.sparse.training import SparseTraining
from hydra_tune.strategies.subnets.deal import deal
from hydra_tune.strategies.subnets.find import find_structure
from hydra_tune.strategies.subnets.shrink import subnet
from hydra_tune.training.batches import epoch_order
from hydra_tune.training.prepared import Prepared
from tests.strategies.pipeline.here import Here, train
from tests.strategies.shard.models import CPU, SEED, finish_in_shards, in_shards, start
from tests.zoo.hugging_face import HUGGING_FACE
from tests.zoo.hugging_face_others import HUGGING_FACE_OTHERS
from tests.zoo.others import OTHERS, collate, of_loss

QUICK = (
    "GPT-2", "Llama", "BERT", "T5", "ViT", "wav2vec2", "LoRA (peft, GPT-2)", "Llama, checkpointed",
    "nn.TransformerEncoder", "seq2seq LSTM", "stochastic depth", "mixture of experts", "borrowed weights",
    "torch.utils.checkpoint", "U-Net", "SegFormer (dense)", "Switch Transformers", "wav2vec2-conformer",
)  # fmt: skip
IN_STAGES = ("GPT-2", "Llama", "BERT", "ViT", "T5")
"""Models that have to be cut into stages, pruned and dealt out."""
CHOSEN = os.environ.get("HYDRA_TUNE_ZOO", "")
"""Models whose rows of the table are written: `all`, or names with semicolons between them; empty to write none."""
OF_TRANSFORMERS = HUGGING_FACE | HUGGING_FACE_OTHERS
ORDER = [*OF_TRANSFORMERS, *OTHERS]
NAMES = {"": QUICK, "all": ORDER}.get(CHOSEN) or CHOSEN.split(";")
EPOCHS, BATCH = 2, 4


class Rows:
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def built(name: str) -> ht.Candidate:
    """The candidate of that name, the same each time."""
    torch.manual_seed(1)
    if name in OF_TRANSFORMERS:
        model, batch = OF_TRANSFORMERS[name]()
        rows, loss = [(row, 0) for row in batch], of_loss
    else:
        model, rows, loss = OTHERS[name]()
    rows = tree_map(lambda leaf: leaf.double() if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf, rows)
    optimizer = partial(torch.optim.AdamW, lr=1e-3)
    return ht.Candidate(
        model=model.double(), loss=loss, optimizer=optimizer, train=Rows(rows), collate=collate, batch_size=BATCH,
        epochs=EPOCHS,
    )  # fmt: skip


def plain_loop(made: ht.Candidate) -> dict[str, torch.Tensor]:
    """The weights after the loop that a user would write."""
    model, rows = made.model, made.train
    optimizer = made.optimizer(model.parameters())
    seed_everything(SEED)
    model.train()
    for epoch in range(EPOCHS):
        order = epoch_order(len(rows), SEED, epoch).tolist()  # type: ignore[arg-type]
        for first in range(0, len(order), BATCH):
            inputs, targets = collate([rows[i] for i in order[first : first + BATCH]])  # type: ignore[index]
            made.loss(call_model(model, inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


@pytest.fixture(scope="module")
def table() -> Any:
    """Writes the rows of the models that passed to docs/models.md, at the end of a run that was asked for them."""
    found: dict[str, dict[str, str]] = {name: {} for name in NAMES}
    yield found
    if CHOSEN:
        path = Path(__file__).parents[2] / "docs" / "models.md"
        rows = {line.split(" | ")[0].removeprefix("| "): line for line in path.read_text().splitlines()}
        for name, cells in found.items():
            if cells.keys() == set(COLUMNS):
                rows[name] = f"| {name} | yes | {' | '.join(cells[each] for each in COLUMNS)} |"
        path.write_text(HEADER + "\n".join(rows[name] for name in ORDER if name in rows) + "\n")


COLUMNS = ("shard", "pipeline", "sparse", "subnets")
HEADER = """# Models

Public architectures and awkward ones, tiny, with random weights, in float64. `whole`, `shard` and `pipeline` end with
the weights of a plain PyTorch loop, to 1e-9, after two epochs. Shards are those of the smallest budget with which the
model trains; in brackets that budget as a part of what `whole` takes. Stages are those of `placer: balanced` on two
devices. `sparse` says how many of the weights can be pruned, `subnets` what is dealt out to two of them; or the reason
why nothing is. Models of transformers are called with labels, and their own loss is used.

Written by `make zoo`; `make zoo MODELS="CLIP;T5"` runs some of them, and leaves the
rows of the others as they are.

| model | whole | shard | pipeline | sparse | subnets |
|---|---|---|---|---|---|
"""


@pytest.mark.parametrize("name", NAMES)
def test_a_model_equals_the_plain_loop(name: str, tmp_path: Path, table: dict[str, dict[str, str]]) -> None:
    expected = plain_loop(built(name))
    whole = start(built(name))
    _train(whole)
    _compare(dict(whole.model.named_parameters()), expected)
    with in_shards(start(built(name)), 0.0, tmp_path) as sharded:
        sharded.rebuild = partial(built, name)
        finish_in_shards(sharded, seconds=0.0)
        count = len(sharded.kit.plan.shards)
        assert count > 1
        assert sharded.memory.peak <= sharded.memory.budget
        _compare({name: t for name, t in sharded.state()["tensors"].items() if name in expected}, expected)
        table[name]["shard"] = f"{count} ({sharded.memory.budget / whole.peak_bytes:.0%})"


@pytest.mark.parametrize("name", NAMES)
def test_a_model_in_stages_equals_the_plain_loop(name: str, tmp_path: Path, table: dict[str, dict[str, str]]) -> None:
    run = Here(built(name), tmp_path, 2, again=partial(built, name))
    try:
        trial = asyncio.run(train(run, Pipeline(microbatches=1, placer="balanced")))
    except CandidateError as error:
        assert name not in IN_STAGES
        table[name]["pipeline"] = _cell(error.message)
        return
    expected = plain_loop(built(name))
    _compare({key: t for key, t in run.state()["tensors"].items() if key in expected}, expected)
    stages = trial.staged.stages
    table[name]["pipeline"] = f"{len(stages)} stages"
    if len({stage.device for stage in stages}) == 1:
        assert name not in IN_STAGES
        (note,) = [note for note in run.notes if note.startswith("all of the model is on one device: ")]
        table[name]["pipeline"] = _cell(note.removeprefix("all of the model is on one device: "))


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_pruned(name: str, table: dict[str, dict[str, str]]) -> None:
    made = built(name)
    pruning = Pruning(sparsity=0.5, mask="magnitude", dense_epochs=0, least=1, rewind=False, mixed=False)
    try:
        training = SparseTraining(Prepared(made, made.train, None), SEED, CPU, pruning, 0, 1)
    except CandidateError as error:
        assert name not in IN_STAGES
        table[name]["sparse"] = _cell(error.message)
        return
    training.train_batches(len(training.batches))
    weights = dict(training.model.named_parameters())
    for layer in training.weights.layers:
        assert int((weights[layer.name] != 0).sum()) <= len(layer.index)
    share = sum(layer.weight.numel() for layer in training.weights.layers) / sum(w.numel() for w in weights.values())
    training.weights.close()
    table[name]["sparse"] = f"{share:.0%} of weights"


@pytest.mark.parametrize("name", NAMES)
def test_a_model_is_dealt_out(name: str, table: dict[str, dict[str, str]]) -> None:
    made = built(name)
    rows = [made.train[i] for i in range(BATCH)]  # type: ignore[index]
    inputs, targets = collate(rows)
    try:
        structure = find_structure(made.model, inputs, subnets=2)
    except CandidateError as error:
        assert name not in IN_STAGES
        table[name]["subnets"] = _cell(error.message.removeprefix("nothing of the model can be dealt out to subnets: "))
        return
    tensors = {**dict(made.model.named_parameters()), **dict(made.model.named_buffers())}
    for dealt in deal(structure, 2, seed=0, turn=0):
        part = subnet(made.model, structure, dealt, tensors)
        made.loss(call_model(part, inputs), targets).backward()
        sizes = {key: p.numel() for key, p in part.named_parameters()}
        assert sum(sizes.values()) < sum(p.numel() for p in made.model.parameters())
        assert all(bool(torch.isfinite(p.grad).all()) for p in part.parameters() if p.grad is not None)
    table[name]["subnets"] = ", ".join(f"{count} {kind}" for kind, count in structure.kinds().items())


def _cell(reason: str) -> str:
    """A reason as it stands in the table: its beginning."""
    text = " ".join(reason.replace("|", "/").split())
    return text if len(text) <= 120 else text[:117] + "..."


def _train(whole: Any) -> None:
    for _ in range(EPOCHS):
        whole.train_for(1e9)
        whole.next_epoch({"loss": 0.0})


def _compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        message: Callable[[str], str] = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-9, msg=message)
