"""The first batch of a sharded trial is compared with the whole model's, and a difference ends the trial."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import hydra_tune as ht
from hydra_tune.core.errors import CandidateError, SearchFailed
from hydra_tune.strategies.shard.first_batch import SAME, Comparison, FirstBatch, first_batch
from tests.strategies.searches import ONE_THREAD
from tests.strategies.shard.models import Adam, candidate, start


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 48), *(nn.Linear(48, 48) for _ in range(6)), nn.Linear(48, 3)])
        self.dropout = nn.Dropout(0.3)

    def scale(self) -> float:
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = self.dropout(torch.tanh(layer(x)))
        return self.layers[-1](x) * self.scale()  # type: ignore[no-any-return]


class Counting(Layers):
    """Counts its calls where nobody can see it: each call gives something else."""

    calls = 0

    def scale(self) -> float:
        type(self).calls += 1
        return 1.0 + type(self).calls


class OwnGenerators(Layers):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.torch_numbers = torch.Generator().manual_seed(3)
        self.python_numbers = random.Random(3)

    def scale(self) -> float:
        return 1.0 + float(torch.rand((), generator=self.torch_numbers)) + self.python_numbers.random()


def build(kind: type[Layers], trial: Any = None) -> ht.Candidate:
    torch.manual_seed(3)
    return candidate(model=kind().double(), optimizer=Adam)


def searched(kind: type[Layers]) -> ht.SearchResult:
    return ht.search(
        partial(build, kind), trials=1, devices=ONE_THREAD, device_memory="220KiB", strategy="shard", seed=5,
        progress=False, study="f",
    )  # fmt: skip


@pytest.mark.parametrize("kind", [Layers, OwnGenerators])
def test_the_comparison_is_recorded_with_the_trial(kind: type[Layers], capsys: pytest.CaptureFixture[str]) -> None:
    from hydra_tune.cli.app import app

    searched(kind)
    with pytest.raises(SystemExit):
        app(["show", "f", "0"])
    assert SAME in " ".join(capsys.readouterr().out.split())


def test_a_model_that_counts_its_calls_is_refused() -> None:
    with pytest.raises(SearchFailed, match=r"in shards the loss is .* in the first batch, and .* the whole model"):
        searched(Counting)


def test_the_model_is_left_as_it_was() -> None:
    training = start(build(OwnGenerators))
    before = {name: tensor.detach().clone() for name, tensor in training.named_tensors().items()}
    found, _ = first_batch(training, [], [])
    again, _ = first_batch(training, [], [])
    assert found is not None
    assert found == again
    assert found.gradients.keys() == before.keys()
    assert all(p.grad is None for p in training.model.parameters())
    for name, tensor in training.named_tensors().items():
        assert torch.equal(tensor, before[name])


def test_a_wrong_gradient_is_named() -> None:
    expected = FirstBatch(0.5, {"a": 3.0, "b": 1e-9, "c": 2.0})
    types = dict.fromkeys("abc", torch.float32)

    def compared(b: float, c: float) -> Comparison:
        made = Comparison(expected, loss=0.5)
        for name, norm in (("a", 3.0), ("b", b), ("c", c)):
            made.add_gradient(name, torch.tensor(norm))
        return made

    compared(0.0, 2.0001).check(types)  # rounding, and the rounding of nothing
    with pytest.raises(CandidateError, match=r"the gradient of 'c' has norm 2\.1 in the first batch, and 2 if"):
        compared(0.0, 2.1).check(types)
    with pytest.raises(CandidateError, match="'b'"):
        compared(0.5, 2.0).check(types)
