"""The contract of all placers: each placement can be run as returned, with both kinds of transfers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_tune.core.errors import HydraTuneError, SpecError
from hydra_tune.graph.placement import ALGORITHMS, Placement, PlacementInfeasible, place
from hydra_tune.graph.placement.problem import CHANNELS, read_problem
from hydra_tune.graph.placement.simulate import Schedule, simulate, transfers

pytestmark = pytest.mark.smoke
everywhere = pytest.mark.parametrize("channel", CHANNELS)
every_placer = pytest.mark.parametrize("algorithm", ALGORITHMS)


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, Any]:
    """What `place` may be given: up to twelve nodes, some of no time or no memory, one to four devices."""
    count, devices = draw(st.integers(0, 12)), draw(st.integers(1, 4))
    pairs = [(u, v) for v in range(count) for u in range(v)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=20)) if pairs else []
    names = draw(st.permutations(range(count)))
    edges = {(names[u], names[v]): draw(st.integers(0, 9)) for u, v in chosen}
    memory = {node: draw(st.integers(0, 9)) for node in range(count)}
    total = sum(memory.values())
    cap = st.integers(total // devices, max(1, total))
    return {
        "times": {node: draw(st.integers(0, 9)) for node in range(count)},
        "memory": memory,
        "edges": edges,
        "devices": devices,
        "capacity": draw(st.none() | cap | st.lists(cap, min_size=devices, max_size=devices)),
        "edge_bytes": draw(st.none() | st.just({edge: size % 4 for edge, size in edges.items()})),
        "groups": draw(st.lists(st.sets(st.sampled_from(range(count)), min_size=1, max_size=3), max_size=2))
        if count
        else [],
    }


def check(placed: Placement, given: Mapping[str, Any]) -> None:
    """Check all guarantees of a placement, computed from its input alone."""
    times, edges, sizes = given["times"], given["edges"], given.get("edge_bytes") or {}
    devices, capacity = given["devices"], given.get("capacity")
    caps = capacity if isinstance(capacity, list) else [math.inf if capacity is None else capacity] * devices
    assert placed.device.keys() == placed.start.keys() == times.keys() == set(placed.sequence)
    assert set(placed.device.values()) <= set(range(devices))
    stop = {node: placed.start[node] + times[node] for node in times}
    assert placed.makespan == max(stop.values(), default=0)
    for (u, v), seconds in edges.items():
        assert placed.start[v] >= stop[u] + (seconds if placed.device[u] != placed.device[v] else 0)
    for device in range(devices):
        mine = [node for node in placed.sequence if placed.device[node] == device]
        assert all(stop[a] <= placed.start[b] for a, b in itertools.pairwise(mine))
    for group in given.get("groups", ()):
        assert len({placed.device[node] for node in group}) == 1
    used = [0] * devices
    for node, size in given["memory"].items():
        used[placed.device[node]] += size
    for (u, v), size in sizes.items():
        if placed.device[u] != placed.device[v]:
            used[placed.device[v]] += size
    assert placed.memory == tuple(used)
    assert all(size <= cap for size, cap in zip(used, caps, strict=True))


def replay(placed: Placement, given: Mapping[str, Any], channel: str) -> Schedule:
    """Return the schedule that the simulator computes for a placement."""
    problem = read_problem(**given, channel=channel)
    number = {node: i for i, node in enumerate(problem.nodes)}
    device = [placed.device[node] for node in problem.nodes]
    schedule = simulate(problem, device, [number[node] for node in placed.sequence])
    if channel == "sequential":
        moving = transfers(problem, schedule)
        for used in range(given["devices"]):
            mine = [t for t in moving if used in (device[t.giver], device[t.taker])]
            assert all(a.stop <= b.start for a, b in itertools.pairwise(mine)), "one transfer at a time"
        assert all(schedule.start[t.taker] >= t.stop for t in moving)
        assert all(t.start >= schedule.start[t.giver] + problem.times[t.giver] for t in moving)
    return schedule


@every_placer
@everywhere
@settings(max_examples=100, deadline=None)
@given(given=graphs())
def test_a_placement_can_be_run_as_it_says(algorithm: str, channel: str, given: dict[str, Any]) -> None:
    try:
        placed = place(**given, algorithm=algorithm, channel=channel)
    except PlacementInfeasible:
        return
    check(placed, given)
    confirmed = replay(placed, given, channel)
    assert confirmed.makespan == placed.makespan
    other = replay(placed, given, CHANNELS[1 - CHANNELS.index(channel)])
    slow, fast = (confirmed, other) if channel == "sequential" else (other, confirmed)
    assert fast.makespan <= slow.makespan
    again = place(**given, algorithm=algorithm, channel=channel)
    assert again == placed, "the same input, the same placement"


@every_placer
def test_nodes_may_be_anything_that_can_be_a_key(algorithm: str) -> None:
    times: dict[Hashable, float] = {"stem": 1, ("block", 0): 2.5, None: 3}
    placed = place(times, dict.fromkeys(times, 1), {("stem", None): 0.5}, devices=2, algorithm=algorithm)
    assert placed.device.keys() == times.keys()
    assert placed.algorithm == algorithm or algorithm == "best"


def test_an_empty_graph_takes_no_time() -> None:
    placed = place({}, {}, {}, devices=2, capacity=0)
    assert (placed.makespan, placed.memory, placed.device) == (0, (0, 0), {})


def line(count: int, memory: int = 1) -> dict[str, Any]:
    """A chain of nodes of one second, whose transfers take another one."""
    return {
        "times": dict.fromkeys(range(count), 1), "memory": dict.fromkeys(range(count), memory),
        "edges": {(i, i + 1): 1 for i in range(count - 1)},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            {"algorithm": "m-etc"},
            "there is no placer 'm-etc' (did you mean 'm-etf'? known: best, m-etf, m-sct, m-topo)",
        ),
        (
            {"channel": "paralel"},
            "there is no channel 'paralel' (did you mean 'parallel'? known: parallel, sequential)",
        ),
        ({"devices": 0}, "devices cannot be 0 (give how many there are, 1 or more)"),
        ({"capacity": [5, 5, 5]}, "capacity names 3 devices and there are 2 (give one number, or one for each device)"),
        ({"capacity": -1}, "capacity cannot be -1 (give bytes, 0 or more, or None for no limit)"),
        ({"times": {0: 1, 1: -2, 2: 1}}, "times of node 1 cannot be -2 (give 0 or more)"),
        ({"times": {0: 1, 1: math.nan, 2: 1}}, "times of node 1 cannot be nan (give 0 or more)"),
        ({"memory": {0: 1, 1: 1}}, "memory lacks node 2 (times and memory have the same nodes)"),
        ({"edges": {(0, 7): 1}}, "edge (0, 7) has an unknown node 7 (name it in times, or go without)"),
        ({"edges": {(0, 1): -1}}, "edge (0, 1) cannot take -1 (give 0 or more)"),
        ({"edges": {(0, 1): 1, (1, 2): 1, (2, 1): 1}}, "the graph has a circle: 2 → 1 → 2 (take one of its edges out)"),
        ({"edges": {(1, 1): 1}}, "the graph has a circle: 1 → 1 (take one of its edges out)"),
        ({"edge_bytes": {(0, 2): 1}}, "edge_bytes has an unknown edge (0, 2) (name it in edges, or go without)"),
        ({"groups": [{0, "x"}]}, "a group has an unknown node 'x' (name it in times, or go without)"),
    ],
)
def test_what_makes_no_sense_is_named_with_its_mending(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        place(**{**line(3), "devices": 2, **changed})
    assert str(caught.value) == says


def test_what_lacks_is_named_in_bytes() -> None:
    with pytest.raises(
        PlacementInfeasible, match="node 1 takes 9 B, and the largest device has 6 B: each device lacks 3 B"
    ) as caught:
        place({0: 1, 1: 1}, {0: 1, 1: 9}, {}, devices=2, capacity=6)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, HydraTuneError)
    with pytest.raises(
        PlacementInfeasible, match="all nodes take 10 B, and all devices have 8 B: each device lacks 1 B"
    ):
        place(**line(5, 2), devices=2, capacity=[3, 5])
    with pytest.raises(
        PlacementInfeasible, match="no placement of 3 groups of nodes fits 2 devices: each device lacks 1 B"
    ) as caught:
        place(**line(3, 3), devices=2, capacity=5, edge_bytes={(0, 1): 0, (1, 2): 2})
    assert caught.value.lacking_bytes == 1
