"""The scheduler is a pure function: tables of waiting units in, a choice out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_tune.engine.scheduler import POLICIES, Waiting, WorkerView, choose, fair, fifo, longest_remaining
from hydra_tune.engine.unit import Role, Unit

pytestmark = pytest.mark.smoke

DEVICE = WorkerView(1, Role.DEVICE)


def work() -> None: ...


def unit(trial: int, worker: int | None = None, role: Role = Role.DEVICE, remaining: float | None = None) -> Unit:
    return Unit(
        trial=trial,
        attempt=f"a{trial}",
        kind="train",
        work=work,
        worker=worker,
        role=role,
        remaining=remaining,
    )


def test_nothing_waits() -> None:
    assert choose([], DEVICE) is None


def test_a_unit_goes_only_where_its_state_is() -> None:
    elsewhere = Waiting(unit(0, worker=2), 0, -1)
    assert choose([elsewhere], DEVICE) is None
    assert choose([elsewhere], WorkerView(2, Role.DEVICE)) is elsewhere.unit


def test_builds_go_to_the_builder_only() -> None:
    build = Waiting(unit(0, role=Role.BUILDER), 0, -1)
    assert choose([build], DEVICE) is None
    assert choose([build], WorkerView(9, Role.BUILDER)) is build.unit


def test_fair_serves_the_trial_whose_turn_is_longest_ago_and_begun_trials_first() -> None:
    new, recent, old = Waiting(unit(0), 0, -1), Waiting(unit(1), 1, 8), Waiting(unit(2), 2, 5)
    assert choose([new, recent, old], DEVICE, fair) is old.unit
    assert choose([new], DEVICE, fair) is new.unit


def test_fifo_serves_in_order_of_arrival() -> None:
    first, second = Waiting(unit(0), 3, 9), Waiting(unit(1), 4, 0)
    assert choose([second, first], DEVICE, fifo) is first.unit


def test_longest_remaining_prefers_the_unknown_then_the_longest() -> None:
    short, long, unknown = (Waiting(unit(i, remaining=r), i, 0) for i, r in enumerate((1.0, 9.0, None)))
    assert choose([short, long], DEVICE, longest_remaining) is long.unit
    assert choose([short, long, unknown], DEVICE, longest_remaining) is unknown.unit


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([None, 1, 2]), st.integers(-1, 9)), max_size=12),
    st.sampled_from(sorted(POLICIES)),
)
def test_whatever_waits_a_choice_is_always_runnable(rows: list[tuple[int, int | None, int]], policy: str) -> None:
    waiting = [Waiting(unit(trial, worker), i, turn) for i, (trial, worker, turn) in enumerate(rows)]
    chosen = choose(waiting, DEVICE, POLICIES[policy])
    runnable = [w.unit for w in waiting if w.unit.worker in (None, 1)]
    assert (chosen in runnable) if runnable else chosen is None
