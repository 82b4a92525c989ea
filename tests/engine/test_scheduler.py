"""The scheduler, a pure class: it chooses the same unit as a plain search through all units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_tune.engine.scheduler import (
    POLICIES,
    Policy,
    Ready,
    ReadyUnits,
    WorkerView,
    can_run,
    longest_remaining,
    oldest,
    tuned,
)
from hydra_tune.engine.unit import Memory, Role

pytestmark = pytest.mark.smoke

DEVICE = WorkerView(1, Role.DEVICE)


def ready(trial: int, **fields: object) -> Ready:
    return Ready(key=trial, trial=trial, attempt=f"a{trial}", **{"arrival": trial, **fields})  # type: ignore[arg-type]


def waiting(policy: str | Policy, *units: Ready) -> ReadyUnits:
    found = ReadyUnits(POLICIES[policy] if isinstance(policy, str) else policy)
    for unit in units:
        found.add(unit)
    return found


def order(units: ReadyUnits, worker: WorkerView = DEVICE) -> list[int]:
    """The trials in the order in which a worker takes them, which remembers what it ran last."""
    taken = []
    while (unit := units.take(worker)) is not None:
        taken.append(unit.trial)
        worker = replace(worker, current=unit.attempt)
    return taken


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_unit_goes_only_where_it_is_bound_and_builds_to_the_builder_only(policy: str) -> None:
    elsewhere, build = ready(0, worker=2), ready(1, role=Role.BUILDER)
    units = waiting(policy, elsewhere, build)
    assert units.take(DEVICE) is None
    assert units.take(WorkerView(2, Role.DEVICE, "a1")) is elsewhere
    assert units.take(WorkerView(9, Role.BUILDER)) is build
    assert len(units) == 0


def test_the_least_rank_goes_first_and_what_has_none_before_it() -> None:
    """Whoever had the last turn."""
    units = [
        ready(0, rank=(1, 0), arrival=0, last_turn=1), ready(1, rank=(0, 0), arrival=3, last_turn=9),
        ready(2, rank=(0, 0), arrival=2, last_turn=9), ready(3, arrival=4), ready(4, rank=(0, 1), arrival=0),
    ]  # fmt: skip
    assert order(waiting("ranked", *units)) == [3, 2, 1, 4, 0]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_builder_serves_the_trial_that_began_first(policy: str) -> None:
    """Its device waits for it, whatever has been asked for since and however long others have to go."""
    builds = [
        ready(trial, role=Role.BUILDER, arrival=9 - trial, remaining=float(trial), last_turn=5 - trial)
        for trial in (2, 0, 1)
    ]
    assert order(waiting(policy, *builds), WorkerView(9, Role.BUILDER, "a2")) == [0, 1, 2]


def test_fair_serves_the_trial_whose_turn_is_longest_ago_and_begun_trials_first() -> None:
    new, recent, old = ready(0), ready(1, last_turn=8), ready(2, last_turn=5)
    assert order(waiting("fair", new, recent, old)) == [2, 1, 0]


def test_fifo_serves_in_order_of_arrival() -> None:
    assert order(waiting("fifo", ready(0, arrival=4), ready(1, arrival=3, last_turn=9))) == [1, 0]


def test_longest_and_shortest_remaining_prefer_the_unmeasured() -> None:
    units = [ready(i, remaining=left) for i, left in enumerate((1.0, 9.0, None, 9.0))]
    assert order(waiting("lrtf", *units)) == [2, 1, 3, 0]
    assert order(waiting("srtf", *units)) == [2, 0, 1, 3]


def test_random_depends_on_its_seed_only() -> None:
    units = [ready(i) for i in range(50)]
    first = order(waiting(tuned("random", seed=1), *units))
    assert first == order(waiting(tuned("random", seed=1), *reversed(units)))
    assert first != order(waiting(tuned("random", seed=2), *units))
    assert first[:6] == [22, 12, 8, 0, 48, 37], "the same on every machine and in every process"


def test_random_gives_who_waits_long_the_chance_of_who_has_just_come() -> None:
    units, turns = waiting("random", *(ready(i) for i in range(10))), [0] * 10
    for arrival in range(10, 5010):
        taken = units.take(DEVICE)
        turns[taken.trial] += 1
        units.add(ready(taken.trial, arrival=arrival))
    assert all(400 < count < 600 for count in turns), turns


def test_lazy_stays_with_its_trial_until_another_is_more_than_the_slack_behind() -> None:
    lazy = tuned("lazy-lrtf", slack=10.0, move_slack=0.0)
    own, longer = ready(0, remaining=20.0), ready(1, remaining=30.0)
    here = replace(DEVICE, current="a0")
    assert waiting(lazy, own, longer).peek(here) is own
    assert waiting(lazy, own, replace(longer, remaining=30.1)).peek(here).trial == 1
    assert waiting(lazy, own, replace(longer, remaining=None)).peek(here).trial == 1, "to be measured"
    assert waiting(lazy, replace(own, remaining=None), replace(longer, remaining=None)).peek(here).trial == 0
    assert waiting(lazy, replace(own, worker=7), longer).peek(here) is longer, "bound elsewhere"
    assert waiting(lazy, own, longer).peek(replace(DEVICE, current="gone")) is longer


def test_lazy_prefers_what_is_at_home_within_the_move_slack() -> None:
    lazy = tuned("lazy-lrtf", slack=50.0, move_slack=5.0)
    away, home, free = ready(0, remaining=30.0, home=2), ready(1, remaining=25.0, home=1), ready(2, remaining=27.0)
    assert waiting(lazy, away, home).peek(DEVICE) is home
    assert waiting(lazy, away, replace(home, remaining=24.9)).peek(DEVICE) is away
    assert waiting(lazy, away, home, free).peek(DEVICE) is free, "where anywhere is equal, nothing has to move"
    assert waiting("lrtf", away, home).peek(DEVICE) is away


def test_other_slacks() -> None:
    assert tuned("lazy-lrtf") == POLICIES["lazy-lrtf"]
    assert (tuned("lazy-lrtf", slack=3.0).slack, tuned("lazy-lrtf", slack=3.0).move_slack) == (3.0, 3.0)
    assert tuned("lrtf", slack=3.0) == POLICIES["lrtf"]


def test_a_unit_is_replaced_by_one_of_its_key_and_can_be_discarded() -> None:
    units = waiting("lrtf", ready(0, remaining=1.0), ready(1, remaining=5.0))
    units.add(ready(0, remaining=9.0))
    assert len(units) == 2
    assert units.peek(DEVICE).trial == 0
    units.discard(0)
    units.discard("nothing")
    assert 0 not in units
    assert [unit.trial for unit in units] == [1]
    assert [unit.trial for unit in units.of_attempt("a1")] == [1]
    assert order(units) == [1]
    assert units.of_attempt("a1") == []


def test_what_is_gone_takes_no_memory() -> None:
    units = ReadyUnits(POLICIES["lazy-lrtf"])
    units.add(ready(0, remaining=1e9, home=1))
    for i in range(1, 5000):
        units.add(ready(i, remaining=float(i), home=1))
        units.discard(i)
    assert sum(len(heap.entries) for heaps in (units._pools, units._homes) for heap in heaps.values()) < 200


def plain_choice(units: Sequence[Ready], worker: WorkerView, policy: Policy) -> Ready | None:
    """Return the unit that `peek` should return, by a search through all units."""

    def left(unit: Ready) -> float:
        return math.inf if unit.remaining is None else unit.remaining

    fitting = [unit for unit in units if can_run(unit, worker)]
    if not fitting:
        return None
    if worker.role is Role.BUILDER:
        return min(fitting, key=oldest)
    best = min(fitting, key=policy.order)
    if not policy.lazy:
        return best
    own = [unit for unit in fitting if unit.attempt == worker.current]
    near = [unit for unit in fitting if (unit.home if unit.worker is None else unit.worker) in (None, worker.worker)]
    for candidates, slack in ((own, policy.slack), (near, policy.move_slack)):
        chosen = min(candidates, key=policy.order, default=None)
        if chosen is not None and (left(chosen) == left(best) or left(best) - left(chosen) <= slack):
            return chosen
    return best


UNITS = st.builds(
    Ready,
    key=st.integers(0, 15),
    trial=st.integers(0, 5),
    attempt=st.sampled_from(["a", "b", "c"]),
    role=st.sampled_from([Role.DEVICE, Role.DEVICE, Role.BUILDER]),
    worker=st.sampled_from([None, None, 1, 2]),
    home=st.sampled_from([None, 1, 2]),
    remaining=st.none() | st.floats(0, 100),
    last_turn=st.integers(-1, 9),
)
VIEWS = st.builds(
    WorkerView, st.integers(1, 3), st.sampled_from(list(Role)), st.sampled_from([None, "a", "b", "c", "d"])
)
STEPS = st.lists(st.one_of(UNITS, st.integers(0, 15), VIEWS), max_size=60)


@settings(deadline=None)
@given(STEPS, st.sampled_from([*sorted(POLICIES), "eager"]))
def test_any_sequence_of_calls_chooses_as_a_plain_search_does(steps: list[Ready | int | WorkerView], name: str) -> None:
    eager = Policy(longest_remaining, lazy=True, slack=3.0, move_slack=20.0)
    policy = eager if name == "eager" else POLICIES[name]
    units, model = ReadyUnits(policy), dict[object, Ready]()
    for arrival, step in enumerate(steps):
        if isinstance(step, Ready):
            added = replace(step, arrival=arrival)
            units.add(added)
            model[added.key] = added
        elif isinstance(step, int):
            units.discard(step)
            model.pop(step, None)
        else:
            expected = plain_choice(list(model.values()), step, policy)
            taken = units.take(step)
            if policy.drawn and step.role is Role.DEVICE:
                assert (taken is None) == (expected is None)
                assert taken is None or (model[taken.key] is taken and can_run(taken, step))
            else:
                assert taken is expected
            if taken is not None:
                del model[taken.key]
        assert len(units) == len(model)
        assert set(units) == set(model.values())


def placed(**held: Memory) -> WorkerView:
    return WorkerView(1, Role.DEVICE, memory=100, held=held)


@pytest.mark.parametrize(
    ("there", "wanted", "fits"),
    [
        ({}, Memory(100, 50, alone=True), True),
        ({"a": Memory(60, 40)}, Memory(60, 40), True),  # 40 beside one that runs with 60
        ({"a": Memory(60, 40)}, Memory(61, 40), False),
        ({"a": Memory(70, 20)}, Memory(50, 40), False),  # the one that is there would lack room
        ({"a": Memory(10, 5, alone=True)}, Memory(10, 5), False),
        ({"a": Memory(10, 5)}, Memory(10, 5, alone=True), False),
        ({"a": Memory(60, spills=True)}, Memory(90, spills=True), True),  # they take turns
        ({"a": Memory(90, spills=True)}, Memory(30, 20), False),
        ({"a": Memory(30, 10, alone=True)}, Memory(90, spills=True), True),
        ({"a": Memory(30, 11, alone=True)}, Memory(90, spills=True), False),
    ],
)
def test_a_trial_goes_where_it_fits_beside_the_others(there: dict[str, Memory], wanted: Memory, fits: bool) -> None:
    assert placed(**there).has_room("b", wanted) is fits
    ready = ReadyUnits(POLICIES["lrtf"])
    ready.add(Ready(1, 1, "b", memory=wanted, remaining=9.0))
    ready.add(Ready(2, 2, "c", remaining=1.0))
    first = ready.take(placed(**there))
    assert first is not None
    assert first.key == (1 if fits else 2)
    assert len(ready) == 1  # who was passed over still waits
    bound = Ready(3, 1, "b", worker=1, memory=wanted, remaining=9.0)
    ready.add(bound)
    assert ready.take(placed(**there)) is bound  # what is bound has its place already
