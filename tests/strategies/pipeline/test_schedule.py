"""The simulated time of a pipelined step, compared with values worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hydra_tune.strategies.pipeline.schedule import in_flight, predict, users_of
from hydra_tune.strategies.pipeline.stages import Stage


def chain(devices: list[int], forward: float = 1.0, backward: float = 2.0) -> list[Stage]:
    """Stages one after another, stage i giving value i + 1."""
    last = len(devices) - 1
    return [
        stage(i, device, (i,), () if i == last else (i + 1,), (i - 1,) if i else (), forward, backward, loss=i == last)
        for i, device in enumerate(devices)
    ]


def stage(
    index: int, device: int, takes: tuple[int, ...], gives: tuple[int, ...], before: tuple[int, ...],
    forward: float = 1.0, backward: float = 2.0, loss: bool = False,
) -> Stage:  # fmt: skip
    return Stage(
        index, device, (index,), takes, gives, before, loss=loss, forward_seconds=forward, backward_seconds=backward,
        step_seconds=0.0, state_bytes=0, activation_bytes=0, peak_bytes=0, nodes=(str(index),),
    )  # fmt: skip


def seconds(stages: list[Stage], devices: int, microbatches: int, order: str = "1f1b", way: float = 0.0) -> float:
    return predict(
        stages, devices, microbatches, order, way=lambda one, other: way, step_seconds=[0.0] * devices
    ).seconds


@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("devices", "microbatches"), [(1, 1), (2, 1), (2, 4), (2, 8), (3, 6), (4, 16)])
def test_equal_stages_take_as_long_as_the_microbatches_and_one_way_through(
    devices: int, microbatches: int, order: str
) -> None:
    """(m + d - 1) times forward and backward, the known length of both orders (GPipe, section 2.3)."""
    stages = chain(list(range(devices)))
    assert seconds(stages, devices, microbatches, order) == pytest.approx(3.0 * (microbatches + devices - 1))


def test_the_last_stage_has_one_microbatch_in_flight_and_the_first_one_more_than_devices() -> None:
    stages = chain([0, 1, 2])
    assert in_flight(stages, "1f1b", 8) == [4, 3, 1]
    assert in_flight(stages, "gpipe", 8) == [8, 8, 8]
    assert in_flight(stages, "1f1b", 2) == [2, 2, 1]


def test_hand_overs_are_hidden_behind_the_microbatch_that_is_on_its_way() -> None:
    """The way costs at the start and at the end of a step, not at each micro-batch."""
    stages = chain([0, 1])
    assert seconds(stages, 2, 8, way=0.2) <= 3.0 * 9 + 4 * 0.2


def test_the_last_micro_batch_does_not_keep_others_waiting_for_gradients_of_weights() -> None:
    """Once for each device on the way back, and a device is busy no less."""
    stages = chain([0, 1, 2])
    found = [stages[0], *(replace(each, later_seconds=0.4) for each in stages[1:])]
    assert seconds(found, 3, 6) == pytest.approx(seconds(stages, 3, 6) - 2 * 0.4)
    whole, halves = (predict(s, 3, 6, "1f1b", way=lambda *_: 0.0, step_seconds=[0.0] * 3) for s in (stages, found))
    assert halves.busy == pytest.approx(whole.busy)


def test_a_forward_that_others_wait_for_goes_before_a_backward() -> None:
    """By first come, first served, the last forward would wait behind a backward, and the device for its return."""
    first, last = chain([0, 1])
    stages = [replace(first, forward_seconds=2.0, backward_seconds=2.0), last]
    assert seconds(stages, 2, 4) == 4 * (2.0 + 2.0), "the first device never waits"


def test_a_device_with_two_stages_takes_them_in_turn() -> None:
    """A tied head: the last stage is on the first device, which does two thirds of the work."""
    stages = chain([0, 1, 0])
    assert seconds(stages, 2, 8) < 3.0 * 3 * 8, "not one after another"
    assert seconds(stages, 2, 8) >= 3.0 * 2 * 8, "no less than the first device's work"


def test_branches_run_at_the_same_time() -> None:
    branching = [
        stage(0, 0, (0,), (1,), ()),
        stage(1, 0, (1,), (2,), (0,)),
        stage(2, 1, (1,), (3,), (0,)),
        stage(3, 0, (2, 3), (), (1, 2), loss=True),
    ]
    assert users_of(branching) == [[1, 2], [3], [3], []]
    # forward 0, then both branches at once, then 3 with its backward, both branches back, and 0 back
    assert seconds(branching, 2, 1) == pytest.approx(1 + 1 + 3 + 2 + 2)


def test_a_stage_that_nobody_takes_from_is_waited_for_by_none() -> None:
    dead = [stage(0, 0, (0,), (1,), ()), stage(1, 0, (1,), (), (0,), loss=True), stage(2, 1, (1,), (), (0,))]
    assert in_flight(dead, "1f1b", 4)[2] == 4
    assert seconds(dead, 2, 4) > 0


def test_trials_at_once_fill_gaps_but_not_a_busy_device() -> None:
    """Two equal stages, four micro-batches: a step has 12 seconds of work a device and 3 of waiting."""
    even = predict(chain([0, 1]), 2, 4, "1f1b", way=lambda one, other: 0.0, step_seconds=[0.0, 0.0])
    assert [even.shared_seconds(trials) for trials in (1, 2, 3)] == [15.0, 24.0, 36.0]
    alone = predict(chain([0]), 1, 4, "1f1b", way=lambda one, other: 0.0, step_seconds=[0.0])
    assert [alone.shared_seconds(trials) for trials in (1, 2)] == [12.0, 24.0]
