"""Checkpoints: any training state is restored unchanged, damage is noticed, nothing is unpickled."""

from __future__ import annotations

import errno
import os
import time
from collections import Counter, OrderedDict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hydra_tune.coordinator.attempt import Attempt
from hydra_tune.core.state_tree import NotStorable, decode, encode
from hydra_tune.training.checkpoint import CheckpointError, Checkpoints
from hydra_tune.training.loop import Training
from tests.candidates import small_candidate

pytestmark = pytest.mark.smoke

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.integers() | st.text() | st.tuples(st.integers(), st.integers())
trees = st.recursive(
    plain, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner), max_leaves=20
)


@given(trees)
def test_any_tree_of_plain_values_comes_back_equal(tree: Any) -> None:
    document, tensors = encode(tree)
    import json

    assert decode(json.loads(json.dumps(document)), tensors) == tree


def test_tensors_arrays_and_special_containers_come_back() -> None:
    tree = {
        "t": torch.arange(6.0).view(2, 3).t(), "half": torch.ones(2, dtype=torch.bfloat16), "b": torch.tensor([True]),
        "key": np.arange(5, dtype=np.uint32), "counter": Counter({30: 1, 60: 2}), "ordered": OrderedDict(a=1),
        "scalar": np.float32(0.5), "inf": float("inf"),
    }  # fmt: skip
    back = decode(*encode(tree))
    assert torch.equal(back["t"], tree["t"])
    assert back["half"].dtype is torch.bfloat16
    assert back["key"].dtype == np.uint32
    assert type(back["counter"]) is Counter
    assert back["counter"] == tree["counter"]
    assert type(back["ordered"]) is OrderedDict
    assert (back["scalar"], back["inf"]) == (0.5, float("inf"))


def test_what_a_checkpoint_cannot_hold_is_refused() -> None:
    with pytest.raises(NotStorable, match="function"):
        encode({"f": lambda: 0})


SCHEDULES: dict[str, Any] = {
    "multistep": partial(torch.optim.lr_scheduler.MultiStepLR, milestones=[3, 7], gamma=0.3),
    "onecycle": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=60),
    "cosine": partial(torch.optim.lr_scheduler.CosineAnnealingWarmRestarts, T_0=4),
    "lambda": partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.9**step),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o, 0.1), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [5]
    ),
}
OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, centered=True),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_from_a_checkpoint_bit_for_bit(tmp_path: Path, schedule: str, optimizer: str) -> None:
    """Stopped in the middle of an accumulation, with dropout and batch-norm: the same weights as without a stop."""

    def training() -> Training:
        torch.manual_seed(1)
        candidate = small_candidate(
            accumulate=3, scheduler=SCHEDULES[schedule], schedule_every="step", clip_grad_norm=1.0, epochs=3,
            optimizer=OPTIMIZERS[optimizer],
        )  # fmt: skip
        return Training(candidate, candidate.train, candidate.valid, seed=1, device=torch.device("cpu"))

    def finish(running: Training) -> dict[str, torch.Tensor]:
        while running.epoch < 3:
            while not running.train_for(0).epoch_done:
                pass
            running.end_epoch()
        return dict(running.model.state_dict())

    unbroken = training()
    expected = finish(unbroken)
    broken = training()
    for _ in range(11):
        broken.train_for(0)
    broken.end_epoch()
    for _ in range(4):
        broken.train_for(0)
    Checkpoints(tmp_path / "c").save(15, broken.state())
    del broken
    again = training()
    found = Checkpoints(tmp_path / "c").newest()
    assert found is not None
    again.restore(found.state)
    assert (again.epoch, again.batch) == (1, 4)
    for name, tensor in finish(again).items():
        assert torch.equal(tensor, expected[name]), name
    assert again.history == unbroken.history


def test_the_last_two_are_kept_and_all_go_at_the_end(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c")
    assert checkpoints.newest() is None
    for step in (5, 10, 15):
        checkpoints.save(step, {"x": torch.full((3,), float(step))})
    assert sorted(file.name for file in checkpoints.directory.iterdir()) == [
        "step-10.json", "step-10.safetensors", "step-15.json", "step-15.safetensors",
    ]  # fmt: skip
    checkpoints.remove()
    assert not checkpoints.directory.exists()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "json", "missing", "empty"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {"x": torch.full((100,), float(step))})
    newest = tmp_path / ("step-2.json" if damage == "json" else "step-2.safetensors")
    data = bytearray(newest.read_bytes())
    if damage == "missing":
        newest.unlink()
    else:
        data[-20] ^= 1
        keep = {"truncated": len(data) // 2, "json": len(data) // 2, "empty": 0}.get(damage, len(data))
        newest.write_bytes(data[:keep])
    found = checkpoints.newest()
    assert found is not None
    assert found.step == 1
    assert found.state["x"][0] == 1
    (note,) = found.damaged
    assert note.startswith("the checkpoint of step 2 is damaged (")
    assert note.endswith("); that of step 1 is used")
    (tmp_path / "step-1.safetensors").write_bytes(b"")
    nothing = checkpoints.newest()
    assert nothing is not None
    assert nothing.state is None
    assert [note.partition(" is damaged")[0] for note in nothing.damaged] == [
        "the checkpoint of step 2", "the checkpoint of step 1",
    ]  # fmt: skip
    assert nothing.damaged[1].endswith("; no other is left, and the trial starts again")
    assert not any("is used" in note for note in nothing.damaged)


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": torch.ones(10)})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"a checkpoint of \d+ bytes cannot be written to .* \(No space left"):
        checkpoints.save(2, {"x": torch.ones(10)})
    monkeypatch.undo()
    assert checkpoints.newest().step == 1  # type: ignore[union-attr]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_checkpoint_of_another_model_is_refused() -> None:
    candidate = small_candidate()
    training = Training(candidate, candidate.train, candidate.valid, seed=1, device=torch.device("cpu"))
    other = small_candidate(model=torch.nn.Linear(6, 3).double())
    wrong = Training(other, other.train, other.valid, seed=1, device=torch.device("cpu")).state()
    with pytest.raises(ValueError, match="another model"):
        training.restore(wrong)


def test_a_bit_flipped_in_the_json_half_is_noticed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {"lr": 0.05, "x": torch.ones(3)})
    facts = tmp_path / "step-2.json"
    facts.write_text(facts.read_text().replace("0.05", "0.15"))
    found = checkpoints.newest()
    assert found is not None
    assert (found.step, found.state["lr"]) == (1, 0.05)


class Counting(torch.nn.Module):
    """State that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 3, dtype=torch.float64)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x)

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        self.calls = state


def test_extra_state_and_optimizer_state_of_another_type_come_back() -> None:
    def training() -> Training:
        torch.manual_seed(0)
        candidate = small_candidate(model=Counting(), optimizer=partial(torch.optim.NAdam, lr=0.01))
        return Training(candidate, candidate.train, candidate.valid, seed=1, device=torch.device("cpu"))

    first, second = training(), training()
    for _ in range(3):
        first.train_for(0)
    second.restore(decode(*encode(first.state())))
    assert second.model.calls == 3
    for trainings in (first, second):
        for _ in range(4):
            trainings.train_for(0)
    assert torch.equal(first.model.linear.weight, second.model.linear.weight)


def test_a_checkpoint_on_other_data_is_refused() -> None:
    from tests.candidates import rows

    def training(count: int) -> Training:
        candidate = small_candidate(train=rows(count))
        return Training(candidate, candidate.train, candidate.valid, seed=1, device=torch.device("cpu"))

    with pytest.raises(ValueError, match="other data"):
        training(20).restore(training(103).state())


def test_a_checkpoint_that_would_wait_is_put_off_but_not_for_ever() -> None:
    def due(since: float, *, waits: bool, stopping: bool = False) -> bool:
        settings = SimpleNamespace(checkpoint_seconds=10.0)
        saved = {"_saved": time.monotonic() - since, "_save_seconds": 0.0}
        attempt: Any = SimpleNamespace(settings=settings, stopping=lambda: stopping, **saved)
        return Attempt.checkpoint_due(attempt, waits=waits)

    assert [due(since, waits=False) for since in (9, 11)] == [False, True]
    assert [due(since, waits=True) for since in (11, 29, 31)] == [False, False, True]
    assert due(0, waits=True, stopping=True)
