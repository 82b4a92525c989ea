"""Rehearsals: what a batch takes, measured on a copy, and kept by all that it depends on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from hydra_tune.batches import Batches
from hydra_tune.builds import Prepared
from hydra_tune.planning.rehearsal import rehearse
from hydra_tune.planning.rehearsal_cache import _key, rehearsed
from hydra_tune.training import Training
from tests.candidates import small_candidate

CPU = torch.device("cpu")


def prepared(**fields: Any) -> Prepared:
    made = small_candidate(**fields)
    return Prepared(made, made.train, made.valid)


def key(one: Prepared) -> str:
    return _key(one, Batches(one.candidate, one.train, training=True))


def test_a_rehearsal_leaves_nothing_behind_and_finds_the_memory_of_training() -> None:
    one = prepared()
    before = {name: tensor.clone() for name, tensor in one.candidate.model.state_dict().items()}
    found = rehearse(one, 3, CPU)
    for name, tensor in one.candidate.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(parameter.grad is None for parameter in one.candidate.model.parameters())
    training = Training(one.candidate, one.train, one.valid, 3, CPU)
    training.train_steps(4)
    assert found.peak_bytes == training.peak_bytes
    assert 0 < found.state_bytes < found.peak_bytes
    assert found.batch_seconds > 0


class Repeated(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.layer, self.out = times, nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        out: torch.Tensor = self.out(x)
        return out


def test_what_changes_the_cost_changes_the_key() -> None:
    assert key(prepared()) == key(prepared(lr=0.5))
    assert key(prepared()) != key(prepared(batch_size=5))
    assert key(prepared()) != key(prepared(accumulate=2))
    assert key(prepared(model=Repeated(1).double())) == key(prepared(model=Repeated(1).double()))
    assert key(prepared(model=Repeated(1).double())) != key(prepared(model=Repeated(30).double()))


def test_a_rehearsal_is_kept(tmp_path: Path) -> None:
    one = prepared()
    batches = Batches(one.candidate, one.train, training=True)
    first = rehearsed(one, batches, 3, CPU, tmp_path / "profiles")
    assert rehearsed(one, batches, 3, CPU, tmp_path / "profiles") == first
    for file in (tmp_path / "profiles").iterdir():
        file.write_text("{")
    assert rehearsed(one, batches, 3, CPU, tmp_path / "profiles").peak_bytes == first.peak_bytes
