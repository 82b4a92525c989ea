"""Every member of a pack equals its plain training: float64, 1e-9, whatever its companions and the order of leaving."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_tune.core.state_tree import decode, encode
from hydra_tune.strategies.pack.pack import Pack
from hydra_tune.strategies.pack.signature import signature
from hydra_tune.training.loop import Training
from hydra_tune.training.progress import Diverged
from tests.candidates import rows
from tests.strategies.pack.members import (
    CPU,
    MODELS,
    OPTIMIZERS,
    SCHEDULES,
    Convolved,
    assert_same,
    candidate,
    member,
    whole,
)

FEW = settings(max_examples=8, deadline=None, derandomize=True, database=None)


@st.composite
def searches(draw: st.DrawFn) -> tuple[str, str, dict[str, Any], list[int]]:
    """A model, an optimizer, other fields, and for each member the number of epochs after which it leaves."""
    fields = {
        "schedule": draw(st.sampled_from(sorted(SCHEDULES))), "clip": draw(st.booleans()),
        "smooth": draw(st.booleans()), "accumulate": draw(st.sampled_from((1, 4))),
        "drop_last": draw(st.booleans()),
    }  # fmt: skip
    leaving = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    return draw(st.sampled_from(sorted(MODELS))), draw(st.sampled_from(OPTIMIZERS)), fields, leaving


@given(searches())
@FEW
def test_members_equal_their_whole_runs(search: tuple[str, str, dict[str, Any], list[int]]) -> None:
    """Members leave after some epochs and go on alone to the end."""
    model, kind, fields, leaving = search
    members = [member(candidate(model, kind, i, **fields), i) for i in range(len(leaving))]
    assert len({signature(each) for each in members}) == 1
    pack = Pack(members)
    for epoch in range(3):
        if pack.members:
            assert all(progress.epoch_done for progress in pack.train_for(100.0).values())
            pack.end_epoch()
        for each, last in zip(members, leaving, strict=True):
            if each.pack is None:
                assert each.train_for(100.0).epoch_done
                each.end_epoch()
            elif last == epoch + 1:
                each.leave()
    assert not pack.failures
    for i, each in enumerate(members):
        assert_same(each, whole(candidate(model, kind, i, **fields), i))


@pytest.mark.parametrize(
    ("model", "kind"), [("attentive", kind) for kind in OPTIMIZERS] + [(model, "adamw") for model in MODELS]
)
def test_each_model_with_each_optimizer(model: str, kind: str) -> None:
    fields: dict[str, Any] = {"schedule": "steps", "clip": True, "smooth": True, "accumulate": 4, "epochs": 2}
    members = [member(candidate(model, kind, i, **fields), i) for i in range(3)]
    pack = Pack(members)
    for _ in range(2):
        pack.train_for(100.0)
        pack.end_epoch()
    for i, each in enumerate(members):
        assert_same(each, whole(candidate(model, kind, i, **fields), i))


def test_a_checkpoint_amid_an_epoch_goes_on_in_whole_and_in_another_pack() -> None:
    """Amid an accumulated step, with pending gradients."""
    fields: dict[str, Any] = {"schedule": "steps", "clip": True, "accumulate": 4}
    pack = Pack([member(candidate("dense", "adamw", i, **fields), i) for i in range(3)])
    count = iter(range(100))
    pack.train_while(lambda: next(count) < 1)
    assert {each.batch for each in pack.members} == {2}
    states = [decode(*encode(each.state())) for each in pack.members]
    expected = [whole(candidate("dense", "adamw", i, **fields), i) for i in range(3)]
    made = candidate("dense", "adamw", 1, **fields)
    alone = Training(made, made.train, made.valid, 101, CPU)
    alone.restore(states[1])
    while alone.epoch < 3:
        if alone.train_for(100.0).epoch_done:
            alone.end_epoch()
    assert_same(alone, expected[1])
    again = [member(candidate("dense", "adamw", i, **fields), i) for i in range(3)]
    for each, state in zip(again, states, strict=True):
        each.restore(state)
    other = Pack([again[2], again[0]])
    for _ in range(3):
        other.train_for(100.0)
        other.end_epoch()
    assert_same(again[0], expected[0])
    assert_same(again[2], expected[2])


def test_members_of_different_epochs_share_a_pack() -> None:
    first = member(candidate("noisy", "adam", 0), 0)
    assert first.train_for(100.0).epoch_done
    first.end_epoch()
    late = member(candidate("noisy", "adam", 1), 1)
    pack = Pack([first, late])
    for _ in range(2):
        pack.train_for(100.0)
        pack.end_epoch()
    first.leave()
    pack.train_for(100.0)
    pack.end_epoch()
    assert_same(first, whole(candidate("noisy", "adam", 0), 0))
    assert_same(late, whole(candidate("noisy", "adam", 1), 1))


def test_a_member_that_diverges_leaves_and_the_others_do_not_notice() -> None:
    members = [member(candidate("dense", "momentum", i), i) for i in range(3)]
    with torch.no_grad():
        members[1].model[0].weight.mul_(float("inf"))
    pack = Pack(members)
    for _ in range(3):
        pack.train_for(100.0)
        pack.end_epoch()
    error = pack.failures.pop(members[1])
    assert isinstance(error, Diverged)
    assert "the training loss became nan at step 0" in str(error)
    assert not pack.failures
    assert members[1].pack is None
    for i in (0, 2):
        assert_same(members[i], whole(candidate("dense", "momentum", i), i))


def test_what_a_members_own_code_raises_ends_that_member_only() -> None:
    def failing(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        raise ZeroDivisionError("a metric of the user")

    members = [
        member(candidate("dense", "sgd", i, **({"metrics": {"bad": failing}} if i == 1 else {})), i) for i in range(3)
    ]
    pack = Pack(members)
    pack.train_for(100.0)
    assert set(pack.end_epoch()) == {members[0], members[2]}
    assert isinstance(pack.failures[members[1]], ZeroDivisionError)
    for _ in range(2):
        pack.train_for(100.0)
        pack.end_epoch()
    assert_same(members[2], whole(candidate("dense", "sgd", 2), 2))


class Augmented(torch.utils.data.Dataset[Any]):
    """Rows with noise that the data set draws from the trial's random stream."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, row: int) -> Any:
        inputs, target = self.source[row]
        return inputs + 0.1 * torch.randn(inputs.shape, dtype=inputs.dtype), target


def test_data_that_draw_random_numbers_draw_those_of_their_trial() -> None:
    made = {i: candidate("dense", "adam", i, train=Augmented(candidate("dense", "adam", 0).train)) for i in range(2)}
    members = [member(each, i) for i, each in made.items()]
    pack = Pack(members)
    for _ in range(3):
        pack.train_for(100.0)
        pack.end_epoch()
    for i in range(2):
        again = candidate("dense", "adam", i, train=Augmented(candidate("dense", "adam", 0).train))
        again = candidate("dense", "adam", i, train=again.train)
        assert_same(members[i], whole(again, i))


def test_a_bias_before_batch_norm_in_float32_is_no_reason_to_refuse() -> None:
    """Its gradient is nothing but rounding."""
    made = []
    data = rows(512, dtype=torch.float32)
    for i in range(4):
        torch.manual_seed(i)
        model = Convolved(0.0)
        model.layers[0] = torch.nn.Conv2d(1, 3, 2)
        made.append(member(candidate("dense", "sgd", i, model=model, train=data, valid=data, batch_size=256), i))
    pack = Pack(made)
    assert len(pack.train_for(100.0)) == 4
