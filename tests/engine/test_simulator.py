"""The simulator: the paper's small case, policies against the lower bound, and what no schedule may do."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_tune.engine.residency import Residency
from hydra_tune.engine.scenario import Chain, Outcome, Ran, Scenario
from hydra_tune.engine.scheduler import FOR_WHOLE_TRIALS
from hydra_tune.engine.simulator import simulate

pytestmark = pytest.mark.smoke

# Trials on devices as in the systems that Hydra was compared with: a few for each device, not all alike.
MIXES = [(16, 4), (16, 8), (32, 8), (64, 8), (64, 16), (250, 16)]


def test_the_papers_small_case() -> None:
    """3 models of 2 shards on 2 devices: 12 steps one after another, 8 by tasks, 6 with shards of all (2107.06469)."""
    small = Scenario(trials=3, devices=2, shards=2, batches=1, spread=0, backward=1)
    assert simulate(replace(small, devices=1)).makespan == 12
    for policy in ("lrtf", "lazy-lrtf"):
        assert simulate(replace(small, policy=policy, slack=0)).makespan == 6
    assert simulate(replace(small, policy="fair")).makespan == 8, "which ends a trial before it begins another"


def test_a_batch_is_a_chain_of_two_units_a_shard_less_one() -> None:
    chain = Chain(3, backward=2)
    assert chain.shards == [0, 1, 2, 1, 0]
    assert chain.costs == [1, 1, 3, 2, 2]
    assert Chain(1, backward=2).costs == [3]


@pytest.mark.parametrize(("trials", "devices"), MIXES)
def test_longest_remaining_first_reaches_the_bound_and_the_others_do_not(trials: int, devices: int) -> None:
    mix = Scenario(trials=trials, devices=devices, batches=20)
    ratios = {policy: simulate(replace(mix, policy=policy)).makespan_vs_bound for policy in FOR_WHOLE_TRIALS}
    assert ratios["lrtf"] < 1.002
    assert min(ratios["fifo"], ratios["random"], ratios["srtf"]) > 1.002


@pytest.mark.parametrize(("trials", "devices"), MIXES)
def test_lazy_stays_with_its_trials_at_nearly_the_same_makespan(trials: int, devices: int) -> None:
    mix = Scenario(trials=trials, devices=devices, batches=50, seed=3)
    eager, lazy = (simulate(replace(mix, policy=policy)) for policy in ("lrtf", "lazy-lrtf"))
    assert lazy.same_model_residency > max(0.8, 2 * eager.same_model_residency)
    assert lazy.makespan < 1.005 * eager.makespan


def test_lazy_moves_less_where_moving_costs() -> None:
    mix = Scenario(state_bytes=2**30, device_memory=2**32, bandwidth=2**30)
    eager, lazy = (simulate(replace(mix, policy=policy)) for policy in ("lrtf", "lazy-lrtf"))
    assert lazy.moved_bytes < 0.8 * eager.moved_bytes
    assert lazy.makespan < eager.makespan


@pytest.mark.parametrize("policy", sorted(FOR_WHOLE_TRIALS))
def test_the_same_seed_gives_the_same_run(policy: str) -> None:
    mix = Scenario(trials=20, devices=4, policy=policy, state_bytes=10, device_memory=50, bandwidth=100, seed=5)
    traces: list[list[Ran]] = [[], [], []]
    first, again, other = (simulate(replace(mix, seed=s), t) for s, t in zip((5, 5, 6), traces, strict=True))
    assert first == again
    assert traces[0] == traces[1]
    assert other.makespan != first.makespan


def idle_times(ran_units: list[Ran], end: float) -> list[tuple[float, float]]:
    """When a device had no unit."""
    edges = [0.0, *(edge for ran in ran_units for edge in (ran.given, ran.ends)), end]
    return [(left, right) for left, right in zip(edges[::2], edges[1::2], strict=True) if left < right]


def check(scenario: Scenario, outcome: Outcome, trace: list[Ran]) -> None:
    """What holds for every schedule."""
    chain = Chain(scenario.shards, scenario.backward)
    seconds = scenario.forward_seconds()
    by_trial, by_device = defaultdict(list), defaultdict(list)
    for ran in trace:
        by_trial[ran.trial].append(ran)
        by_device[ran.device].append(ran)
        assert ran.given <= ran.begins
        assert ran.ends == ran.begins + chain.costs[ran.number % len(chain)] * seconds[ran.trial]
    for ran_units in by_trial.values():
        assert [ran.number for ran in ran_units] == list(range(scenario.batches * len(chain))), "all, in order"
    assert len(by_trial) == scenario.trials
    for ran_units in (*by_trial.values(), *by_device.values()):
        assert all(a.ends <= b.given for a, b in itertools.pairwise(ran_units)), "never two at once"
    idle = [gap for device in range(scenario.devices) for gap in idle_times(by_device[device], outcome.makespan)]
    for ran_units in by_trial.values():
        waits = [(0.0, ran_units[0].given), *((a.ends, b.given) for a, b in itertools.pairwise(ran_units))]
        for since, until in waits:
            assert not any(max(since, left) < min(until, right) for left, right in idle), "none idle while one waits"
    assert outcome.units == len(trace)
    assert outcome.makespan == max(ran.ends for ran in trace)
    assert outcome.makespan >= outcome.lower_bound * (1 - 1e-9)
    assert 0 < outcome.utilization <= 1 + 1e-9
    assert outcome.peak_device_bytes <= (scenario.device_memory or outcome.peak_device_bytes)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_schedule_does_two_units_of_a_trial_at_once_or_exceeds_memory(data: st.DataObject) -> None:
    buffering = data.draw(st.booleans())
    held = data.draw(st.integers(2 if buffering else 1, 6))
    scenario = Scenario(
        trials=data.draw(st.integers(1, 12)), devices=data.draw(st.integers(1, 6)),
        policy=data.draw(st.sampled_from(sorted(FOR_WHOLE_TRIALS))), shards=data.draw(st.integers(1, 4)),
        batches=data.draw(st.integers(1, 4)), spread=data.draw(st.sampled_from([0.0, 0.5, 2.0])),
        backward=data.draw(st.sampled_from([1.0, 2.0])), state_bytes=data.draw(st.sampled_from([0, 10])),
        device_memory=data.draw(st.sampled_from([None, 10 * held + 3])), bandwidth=data.draw(st.integers(1, 100)),
        double_buffering=buffering, seed=data.draw(st.integers(0, 99)), slack=data.draw(st.sampled_from([None, 0, 3])),
    )  # fmt: skip
    trace: list[Ran] = []
    check(scenario, simulate(scenario, trace), trace)


@pytest.mark.parametrize("policy", ["lazy-lrtf", "lrtf", "fifo"])
def test_a_device_that_would_be_idle_takes_over_what_another_has_only_chosen(policy: str) -> None:
    """Few trials and early ends: in some of these, nothing is left but what a busy device has chosen as its next."""
    for seed in range(60):
        scenario = Scenario(
            trials=9, devices=5, policy=policy, batches=1, state_bytes=10, device_memory=20, bandwidth=73, seed=seed
        )
        trace: list[Ran] = []
        check(scenario, simulate(scenario, trace), trace)


def test_the_least_recently_used_shard_makes_room_and_changed_ones_are_written() -> None:
    memory = Residency(devices=2, shard_bytes=10, memory=25, bandwidth=10)
    assert [memory.bring(0, 0, (0, shard)) for shard in (0, 1)] == [1, 2], "one after another"
    assert memory.bring(5, 0, (0, 0)) == 1, "it has been there for a while"
    memory.change(0, (0, 0))
    assert memory.bring(5, 0, (0, 2)) == 6
    assert memory.inside(0) == ((0, 0), (0, 2))
    assert memory.bring(10, 0, (0, 3)) == 12, "the changed shard is written, the new one read"
    assert memory.moved_bytes == 50
    assert memory.peak_bytes == 20


def test_a_shard_that_is_changed_elsewhere_is_fetched_anew() -> None:
    memory = Residency(devices=2, shard_bytes=10, memory=None, bandwidth=10)
    for device in (0, 1):
        memory.bring(0, device, (0, 0))
    memory.change(1, (0, 0))
    assert memory.inside(0) == ()
    assert memory.bring(5, 0, (0, 0)) == 7, "written by its holder, then read"
    assert memory.inside(1) == ((0, 0),), "which keeps a good copy"
    memory.forget((0, 0))
    assert memory.inside(0) == memory.inside(1) == ()
