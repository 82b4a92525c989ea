"""The simulator: small cases by hand, policies against the lower bound, and what no schedule may do."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_tune.engine.scenario import Ran, Scenario, ScenarioOutcome
from hydra_tune.engine.scheduler import FOR_WHOLE_TRIALS, POLICIES
from hydra_tune.engine.simulator import simulate

pytestmark = pytest.mark.smoke

# Trials on devices: a few for each device, not all alike.
MIXES = [(16, 4), (16, 8), (32, 8), (64, 8), (64, 16), (250, 16)]
ALL = 10**6


def ran(scenario: Scenario) -> list[tuple[int, int, float, float]]:
    """Trial, device, begin and end of each unit, in the order in which they began."""
    trace: list[Ran] = []
    simulate(scenario, trace)
    return [(one.trial, one.device, one.begins, one.ends) for one in trace]


def test_three_trials_of_two_units_on_two_devices() -> None:
    """Six units take three rounds where trials are changed between units, and four where a trial is run to its end."""
    small = Scenario(trials=3, devices=2, units=2, spread=0)
    assert simulate(small).lower_bound == 3
    assert simulate(replace(small, policy="lrtf", devices=1)).makespan == 6
    assert simulate(replace(small, policy="lazy-lrtf", slack=0)).makespan == 3
    assert simulate(small).makespan == 4, "no trial is behind by more than the slack"
    assert simulate(replace(small, concurrency=2)).makespan == 4, "the third begins when another ends"


def test_whoever_takes_a_trial_up_waits_for_its_state() -> None:
    """Two trials take turns on one device, a second for each way of a move."""
    turns = Scenario(trials=2, devices=1, units=2, spread=0, policy="fifo", state_bytes=10, bandwidth=10)
    assert ran(turns) == [(0, 0, 1, 2), (1, 0, 3, 4), (0, 0, 4, 5), (1, 0, 5, 6)], "both fit"
    assert ran(replace(turns, device_memory=19)) == [(0, 0, 1, 2), (1, 0, 3, 4), (0, 0, 6, 7), (1, 0, 9, 10)]
    assert simulate(turns).moved_bytes == 20
    assert simulate(replace(turns, device_memory=19)).moved_bytes == 60, "read, then twice written and read"


def test_a_lazy_device_has_one_unit_and_another_has_its_next_at_hand() -> None:
    assert {name: POLICIES[name].slots for name in FOR_WHOLE_TRIALS} == {
        "fair": 2, "fifo": 2, "lrtf": 2, "lazy-lrtf": 1, "srtf": 2, "random": 2
    }  # fmt: skip


@pytest.mark.parametrize(("trials", "devices"), MIXES)
def test_longest_remaining_first_reaches_the_bound_and_the_others_do_not(trials: int, devices: int) -> None:
    mix = Scenario(trials=trials, devices=devices, units=200, concurrency=ALL)
    found = {policy: simulate(replace(mix, policy=policy)) for policy in FOR_WHOLE_TRIALS}
    lazy, eager = found.pop("lazy-lrtf"), found.pop("lrtf")
    assert lazy.makespan_vs_bound < 1.005
    assert min(other.makespan_vs_bound for other in found.values()) > 1.02
    assert lazy.makespan < 1.005 * eager.makespan
    assert lazy.same_model_residency > max(0.8, 2 * eager.same_model_residency)


def test_with_few_trials_in_flight_no_policy_reaches_the_bound() -> None:
    for policy in FOR_WHOLE_TRIALS:
        assert simulate(Scenario(policy=policy)).makespan_vs_bound > 1.1


def test_lazy_moves_less_where_moving_costs() -> None:
    mix = Scenario(concurrency=ALL, state_bytes=2**30, device_memory=2**32, bandwidth=2**32)
    eager, lazy = (simulate(replace(mix, policy=policy)) for policy in ("lrtf", "lazy-lrtf"))
    assert lazy.moved_bytes < 0.2 * eager.moved_bytes
    assert lazy.makespan < 0.8 * eager.makespan


@pytest.mark.parametrize("policy", sorted(FOR_WHOLE_TRIALS))
def test_the_same_seed_gives_the_same_run(policy: str) -> None:
    mix = Scenario(trials=20, devices=4, policy=policy, state_bytes=10, device_memory=50, bandwidth=100, seed=5)
    assert simulate(mix) == simulate(mix)
    assert ran(mix) == ran(mix)
    assert simulate(replace(mix, seed=6)).makespan != simulate(mix).makespan


def check(scenario: Scenario, outcome: ScenarioOutcome, trace: list[Ran]) -> None:
    """What holds for every schedule."""
    lengths = scenario.lengths()
    by_trial, by_device = defaultdict(list), defaultdict(list)
    for one in trace:
        by_trial[one.trial].append(one)
        by_device[one.device].append(one)
        assert one.given <= one.begins
        assert one.ends == one.begins + lengths[one.trial][1]
    for trial, (count, seconds) in enumerate(lengths):
        assert [one.number for one in by_trial[trial]] == list(range(count)), "all, in order"
        assert seconds <= scenario.unit_seconds * (1 + 1e-9)
    for units in (*by_trial.values(), *by_device.values()):
        assert all(a.ends <= b.given for a, b in itertools.pairwise(units)), "never two at once"
    spans = [(units[0].given, units[-1].ends) for units in by_trial.values()]
    in_flight = max(sum(begun <= moment < ended for begun, ended in spans) for moment, _ in spans)
    assert in_flight <= (scenario.concurrency or scenario.devices + 1)
    assert outcome.units == len(trace)
    assert outcome.makespan == max(one.ends for one in trace)
    assert outcome.makespan >= outcome.lower_bound * (1 - 1e-9)
    assert 0 < outcome.utilization <= 1 + 1e-9
    assert outcome.moved_bytes % (scenario.state_bytes or 1) == 0
    assert outcome.moved_bytes >= scenario.trials * scenario.state_bytes, "each is read once at least"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_schedule_does_two_units_of_a_trial_at_once_or_begins_too_many(data: st.DataObject) -> None:
    scenario = Scenario(
        trials=data.draw(st.integers(1, 12)), devices=data.draw(st.integers(1, 6)),
        concurrency=data.draw(st.sampled_from([None, 1, 4, ALL])),
        policy=data.draw(st.sampled_from(sorted(FOR_WHOLE_TRIALS))), units=data.draw(st.integers(1, 9)),
        spread=data.draw(st.sampled_from([0.0, 0.5, 2.0])), state_bytes=data.draw(st.sampled_from([0, 10])),
        device_memory=data.draw(st.sampled_from([None, 13, 45])), bandwidth=data.draw(st.integers(1, 100)),
        seed=data.draw(st.integers(0, 99)), slack=data.draw(st.sampled_from([None, 0, 3])),
    )  # fmt: skip
    trace: list[Ran] = []
    check(scenario, simulate(scenario, trace), trace)
