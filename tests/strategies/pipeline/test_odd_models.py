"""Models, losses and data that micro-batches or stages could change: each is exact, or is refused or noted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hydra_tune as ht
from hydra_tune.strategies.pipeline import prepare
from hydra_tune.strategies.pipeline.strategy import InStages, Pipeline
from hydra_tune.strategies.pipeline.units import DoesNotFit
from tests.strategies.pipeline.here import Here, train
from tests.strategies.shard.models import CLASSES, assert_same, candidate, finish, rows, start

Make = Callable[[], ht.Candidate]


def made(model: Callable[[], nn.Module], **fields: Any) -> Make:
    def make() -> ht.Candidate:
        torch.manual_seed(1)
        return candidate(model=model().double(), **fields)

    return make


def check(make: Make, folder: Path, devices: int = 2, **options: Any) -> tuple[Here, InStages]:
    """Train both ways, and compare all that a checkpoint holds."""
    plain = finish(start(make()))
    run = Here(make(), folder, devices)
    trial = asyncio.run(train(run, Pipeline(**options)))
    assert_same(trial.history, plain.history)
    assert_same(run.state(), plain.state())
    return run, trial


@pytest.fixture
def alternating(monkeypatch: pytest.MonkeyPatch) -> None:
    """Atoms go to devices in turn, which no placer would do to such small models."""

    def placed(_prospect: Any, atoms: Any, capacity: Any, *_rest: Any) -> list[int]:
        return [index % len(capacity) for index in range(len(atoms))]

    monkeypatch.setattr(prepare, "_placed", placed)


class Layers(nn.Module):
    """Four layers to make forwards of."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES)


class DeadEnd(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x))
        self.b(h)  # nobody uses it
        return self.head(torch.tanh(self.c(h)))


class SharedInAChain(nn.Module):
    """The first layer shares a weight with the second, and the second another one with the third."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.w, self.v = (nn.Parameter(torch.randn(8, 8) / 8) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layers[0](self.stem(x)) @ self.w)
        x = torch.tanh((self.layers[1](x) @ self.w) @ self.v)
        return self.head(torch.tanh(self.layers[2](x) @ self.v))


class WeightPassedOn(nn.Module):
    """A view of a parameter is a value that another stage uses."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = nn.Parameter(torch.randn(64) / 8)
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.flat.view(8, 8)
        return self.head(torch.tanh(self.stem(x) @ weight))


class AddsInPlace(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        short = self.b(h)
        long = self.c(h)
        long.add_(short)
        return self.head(torch.tanh(long))


class TwoHeads(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = torch.tanh(self.b(torch.tanh(self.a(x))))
        return {"one": self.other(h), "two": self.head(h)}


def of_two_heads(outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs["one"], targets) + F.cross_entropy(outputs["two"], targets)


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "dead end": (DeadEnd, {}),
    "weights shared in a chain": (SharedInAChain, {}),
    "weight passed on": (WeightPassedOn, {"accumulate": 2}),
    "adds in place": (AddsInPlace, {}),
    "two heads": (TwoHeads, {"loss": of_two_heads, "metrics": {}}),
}


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("placer", ["balanced", "m-topo", "best"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_that_are_no_chain(name: str, placer: str, devices: int, tmp_path: Path) -> None:
    model, fields = MODELS[name]
    check(made(model, epochs=1, **fields), tmp_path, devices, placer=placer, microbatches=2)


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"weights shared in a chain"}))
def test_models_in_as_many_stages_as_can_be(name: str, tmp_path: Path, alternating: None) -> None:
    model, fields = MODELS[name]
    _, trial = check(made(model, epochs=1, **fields), tmp_path, microbatches=2)
    assert len(trial.staged.stages) > 2


# Random numbers


def plain_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, CLASSES))


class AlwaysDrops(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.dropout(self.b(F.dropout(self.a(x), 0.2, training=True)), 0.2, training=True)
        return self.head(self.c(h))


def noisy_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs + 0.1 * torch.randn_like(outputs) * outputs.requires_grad, targets)


class Augmented(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows with noise on them."""

    def __init__(self, count: int) -> None:
        self.rows = rows(count)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.rows[index]
        return inputs + 0.1 * torch.randn(6, dtype=torch.float64), target


RANDOM: dict[str, Make] = {
    "loss": made(plain_net, loss=noisy_loss, metrics={}),
    "valid set": made(with_dropout, valid=Augmented(11)),
    "train set": made(plain_net, train=Augmented(23)),
    "evaluation": made(AlwaysDrops),
    "both": made(AlwaysDrops, valid=Augmented(11), train=Augmented(23)),
}


@pytest.mark.parametrize("what", sorted(RANDOM))
def test_random_numbers_are_those_of_the_plain_loop(what: str, tmp_path: Path, alternating: None) -> None:
    _, trial = check(RANDOM[what], tmp_path)
    assert len(trial.staged.stages) > 1


# Losses and batches


class ZeroHead(Layers):
    """All rows have the same outputs at first."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


def weighted(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets, torch.tensor([0.1, 1.0, 5.0], dtype=outputs.dtype))


def ignoring(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets, ignore_index=2)


def contrastive(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


class BatchStatistics(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.head(torch.tanh(self.b(h - h.mean(0))))


COUPLED: dict[str, Make] = {
    "weighted": made(ZeroHead, loss=weighted, metrics={}),
    "ignoring": made(ZeroHead, loss=ignoring, metrics={}),
    "contrastive": made(ZeroHead, loss=contrastive, metrics={}),
    "statistics of the batch": made(BatchStatistics),
    "batch-norm without running statistics": made(
        lambda: nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        ),
        count=20,
        valid=rows(10),
    ),
}


@pytest.mark.parametrize("what", sorted(COUPLED))
def test_rows_that_depend_on_each_other_get_one_microbatch(what: str, tmp_path: Path) -> None:
    run, trial = check(COUPLED[what], tmp_path)
    assert trial.staged.microbatches == 1
    assert any(note.startswith("one micro-batch: ") for note in run.notes)
    (tmp_path / "again").mkdir()
    asked = Here(COUPLED[what](), tmp_path / "again", 2)
    with pytest.raises(ht.HydraTuneError, match=r"microbatches is 2, but .* \(use microbatches: 1\)"):
        asyncio.run(train(asked, Pipeline(microbatches=2)))


def test_a_loss_that_looks_into_the_model_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = plain_net().double()

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, targets) + sum(p.square().sum() for p in model.parameters())

    run = Here(candidate(model=model, loss=loss), tmp_path, 2)
    with pytest.raises(ht.HydraTuneError, match=r"the loss uses the model's parameters \(use --strategy whole"):
        asyncio.run(train(run, Pipeline()))


def test_validation_inputs_of_another_size_are_refused_where_sizes_decide(tmp_path: Path) -> None:
    class Unrolled(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x[:, :6])
            for i in range(x.shape[1]):
                h = h + x[:, i : i + 1]
            return self.head(torch.tanh(self.b(h)))

    inputs, targets = rows(11).tensors
    valid = TensorDataset(torch.cat([inputs, inputs], 1), targets)
    run = Here(made(Unrolled, valid=valid)(), tmp_path, 2)
    with pytest.raises(ht.HydraTuneError, match="decides by sizes"):
        asyncio.run(train(run, Pipeline(microbatches=1, placer="balanced")))


@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
def test_what_is_laid_out_for_a_device_fits_it(order: str, tmp_path: Path) -> None:
    """The room that the plan asks for is enough, and less is refused before training."""

    def wide() -> nn.Module:
        return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(96, 96), nn.Tanh())), nn.Linear(96, 2))

    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(128, 96, generator=generator, dtype=torch.float64), torch.zeros(128).long())
    make = made(wide, train=data, valid=None, batch_size=64, metrics={}, epochs=1)
    lacking = 0
    for room in range(200_000, 3_000_000, 100_000):
        folder = tmp_path / str(room)
        folder.mkdir()
        run = Here(make(), folder, 2, room=room)
        try:
            asyncio.run(train(run, Pipeline(microbatches=8, order=order)))
        except DoesNotFit:
            lacking += 1
        else:
            break
    assert lacking > 0
    assert room < 2_900_000, "it was laid out at last"


class Gates(Layers):
    """Decides by what is in a tensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.head(torch.tanh(self.b(h) if h.sum() > 0 else self.c(h)))


@pytest.mark.parametrize(
    ("model", "placer", "said"),
    [
        (Gates, "balanced", "the model cannot be cut into stages, as a decision of a tensor's contents"),
        (lambda: nn.Linear(6, CLASSES), "balanced", "the model has a single layer with parameters"),
        (plain_net, "m-topo", None),
    ],
    ids=["decides", "one layer", "cut"],
)
def test_a_trial_on_one_device_says_why(model: Any, placer: str, said: str | None, tmp_path: Path) -> None:
    run, trial = check(made(model, epochs=1), tmp_path, placer=placer)
    devices = {stage.device for stage in trial.staged.stages}
    if said is None:
        assert len(devices) == 2 or "placer: balanced divides it in any case" in run.notes[0]
    else:
        assert devices == {0} or devices == {1}
        assert run.notes[0].endswith(f"all of the model is on one device: {said}")
