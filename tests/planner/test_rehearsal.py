"""Rehearsals: what a batch takes, measured on a copy, and kept by all that it depends on."""

from __future__ import annotations

import random
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from hydra_tune.planner.candidate_copies import CannotBeCopied, copied_data
from hydra_tune.planner.rehearsal import rehearse
from hydra_tune.planner.rehearsal_cache import _key, rehearsed
from hydra_tune.training.batches import Batches
from hydra_tune.training.loop import Training
from hydra_tune.training.prepared import Prepared
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


class Through(nn.Module):
    """Its forward leaves the work to a method, which leaves it to a function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.work(x)

    def work(self, x: torch.Tensor) -> torch.Tensor:
        return lightly(self.layer(x))


def lightly(x: torch.Tensor) -> torch.Tensor:
    return again(x) if x.dim() > 9 else x


def again(x: torch.Tensor) -> torch.Tensor:
    return lightly(x)


def test_what_the_forward_calls_is_part_of_what_a_model_is_known_by(monkeypatch: pytest.MonkeyPatch) -> None:
    def heavily(x: torch.Tensor) -> torch.Tensor:
        return (x.unsqueeze(-1) * torch.ones(9)).mean(-1)

    before = key(prepared(model=Through()))
    assert key(prepared(model=Through())) == before
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "lightly", heavily)
        assert key(prepared(model=Through())) != before
    with monkeypatch.context() as patch:
        patch.setattr(Through, "work", lambda self, x: heavily(self.layer(x)))
        assert key(prepared(model=Through())) != before


def test_what_the_loss_is_given_is_part_of_what_a_candidate_is_known_by() -> None:
    keys = [key(prepared(loss=partial(F.cross_entropy, label_smoothing=part))) for part in (0.0, 0.0, 0.1)]
    assert keys[0] == keys[1] != keys[2]


class Drawing(Dataset[Any]):
    """Rows that depend on how often they were asked for."""

    def __init__(self) -> None:
        self.random = random.Random(3)
        self.rows = torch.randn(16, 6, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index] + self.random.random(), index % 2


def test_a_data_set_is_left_as_it_was_and_its_tensors_are_not_copied() -> None:
    data = Drawing()
    state = data.random.getstate()
    rehearse(prepared(train=data, valid=data), 3, CPU)
    assert data.random.getstate() == state
    copied = copied_data(data)
    assert copied.rows is data.rows
    assert copied.random is not data.random
    assert copied[3][0].equal(data[3][0])


def test_what_cannot_be_copied_says_so() -> None:
    data = Drawing()
    data.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(CannotBeCopied, match="lock"):
        copied_data(data)
