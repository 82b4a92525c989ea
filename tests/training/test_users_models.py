"""Unusual models of users: lazy modules, shared storages, complex parameters, optimizers with a closure."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import hydra_tune as ht
from tests.strategies.searches import ONE_THREAD, equals_the_plain_loop
from tests.strategies.shard.models import candidate


class Flat(nn.Module):
    """Weights that are parts of one storage, and a complex one."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(6 * 48 + 48 * 48 + 48 * 48 + 48 * 3, dtype=torch.float64) * 0.2
        sizes = [(48, 6), (48, 48), (48, 48), (3, 48)]
        parts = flat.split([a * b for a, b in sizes])
        self.weights = nn.ParameterList(nn.Parameter(part.view(size)) for part, size in zip(parts, sizes, strict=True))
        self.phase = nn.Parameter(torch.ones(48, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights[:-1]:
            x = torch.tanh(x @ weight.t())
        return torch.fft.ifft(torch.fft.fft(x) * self.phase).real @ self.weights[-1].t()


@pytest.mark.parametrize(("strategy", "memory"), [("whole", None), ("shard", "300KiB")])
def test_weights_in_one_storage_and_complex_ones_are_trained_and_saved(strategy: str, memory: str | None) -> None:
    def build(trial: Any) -> ht.Candidate:
        torch.manual_seed(2)
        return candidate(model=Flat(), optimizer=partial(torch.optim.Adam, lr=0.01))

    result = ht.search(
        build, trials=1, devices=ONE_THREAD, strategy=strategy, device_memory=memory, seed=1, progress=False, study="f"
    )
    equals_the_plain_loop(result, build)


def test_lazy_modules_get_their_parameters_from_the_first_batch() -> None:
    def build(trial: Any) -> ht.Candidate:
        return candidate(model=nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3)).double())

    result = ht.search(build, trials=1, devices=ONE_THREAD, seed=1, progress=False, study="lazy")
    assert {name: tuple(t.shape) for name, t in result.best_model().state_dict().items()} == {
        "0.weight": (8, 6), "0.bias": (8,), "2.weight": (3, 8), "2.bias": (3,)
    }  # fmt: skip


def test_an_optimizer_with_a_closure_is_refused_in_one_line() -> None:
    def build(trial: Any) -> ht.Candidate:
        return candidate(optimizer=torch.optim.LBFGS)

    with pytest.raises(ht.SearchFailed, match=r"optimizer LBFGS needs a closure"):
        ht.search(build, trials=1, devices=ONE_THREAD, seed=1, progress=False, study="closure")
