"""A candidate whose pickled copy would lack something trains the same in shards and whole."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import hydra_tune as ht
from tests.strategies.searches import ONE_THREAD, equals_the_plain_loop
from tests.strategies.shard.models import Adam, candidate


def hooked(trial: Any) -> ht.Candidate:
    """Gradients that a hook of a parameter turns around and shrinks."""
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Linear(6, 48)]
    for _ in range(6):
        layers += [nn.Tanh(), nn.Linear(48, 48)]
    model = nn.Sequential(*layers, nn.Linear(48, 3)).double()
    model[2].weight.register_hook(lambda gradient: -0.1 * gradient)
    return candidate(model=model, optimizer=Adam)


class Normed(nn.Module):
    """Parametrized layers, which torch refuses to pickle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(6, 48))
        spectral = nn.utils.parametrizations.spectral_norm
        self.rest = nn.Sequential(*(spectral(nn.Linear(48, 48)) for _ in range(6)))
        self.head = nn.Linear(48, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.rest(torch.tanh(self.first(x)))))  # type: ignore[no-any-return]


def normed(trial: Any) -> ht.Candidate:
    torch.manual_seed(3)
    return candidate(model=Normed().double(), optimizer=Adam)


@pytest.mark.parametrize("build", [hooked, normed])
@pytest.mark.parametrize(("strategy", "memory"), [("whole", None), ("shard", "220KiB"), ("auto", "220KiB")])
def test_every_trial_equals_the_plain_loop(build: Any, strategy: str, memory: str | None) -> None:
    result = ht.search(
        build, trials=3, devices=ONE_THREAD, device_memory=memory, strategy=strategy, seed=5, progress=False, study="f"
    )
    assert result.completed == 3
    assert all((record.shards > 1) == (memory is not None) for record in result.trials)
    values = {record.value for record in result.trials}
    assert len(values) == len({record.seed for record in result.trials})
    equals_the_plain_loop(result, build)


def unseeded(trial: Any) -> ht.Candidate:
    """Weights from a generator that every process and every call starts elsewhere, and a hook that no copy has."""
    made = hooked(trial)
    with torch.no_grad():
        made.model[4].weight.copy_(torch.rand(48, 48, generator=torch.Generator().manual_seed(time.time_ns() % 2**31)))  # type: ignore[index]
    return made


def test_a_build_that_makes_other_weights_again_is_refused() -> None:
    with pytest.raises(ht.SearchFailed, match="build makes other weights when it is called again with the same seed"):
        ht.search(
            unseeded, trials=1, devices=ONE_THREAD, device_memory="220KiB", strategy="shard", seed=5, progress=False
        )
