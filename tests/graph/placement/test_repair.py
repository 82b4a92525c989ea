"""Placements that do not fit are repaired; only graphs that cannot fit are refused."""

from __future__ import annotations

import itertools
import random

import pytest

from hydra_tune.graph.placement import ALGORITHMS, PlacementInfeasible, place
from hydra_tune.graph.placement.etf import earliest_first
from hydra_tune.graph.placement.memory import NOWHERE, Room
from hydra_tune.graph.placement.problem import read_problem
from hydra_tune.graph.placement.repair import repair

pytestmark = pytest.mark.smoke


def test_a_dead_end_of_the_greedy_placer_is_mended() -> None:
    # Small nodes spread over both devices first; then the large one fits neither, though 4 + 4 and 8 fit well.
    times, memory = {"a": 1, "b": 1, "c": 1}, {"a": 4, "b": 4, "c": 8}
    edges = {("a", "c"): 1, ("b", "c"): 1}
    assert earliest_first(read_problem(times, memory, edges, devices=2, capacity=8)).stuck
    for algorithm in ALGORITHMS:
        placed = place(times, memory, edges, devices=2, capacity=8, algorithm=algorithm)
        assert placed.memory in {(8, 8)}
        assert placed.device["a"] == placed.device["b"] != placed.device["c"]


def test_what_fits_stays_where_it_is() -> None:
    problem = read_problem(
        dict.fromkeys(range(4), 1), {0: 3, 1: 3, 2: 2, 3: 2}, {}, devices=2, capacity=5
    )  # fmt: skip
    assert repair(problem, [1, 0, 1, 0]) == [1, 0, 1, 0]
    mended = repair(problem, [0, 0, 1, 1])
    assert Room.of(problem, mended).used == (5, 5)
    assert sum(a != b for a, b in zip(mended, [0, 0, 1, 1], strict=True)) == 2, "one swap"


@pytest.mark.parametrize("seed", range(20))
def test_perfect_packings_of_many_groups_are_found(seed: int) -> None:
    """Three devices filled to the last byte by 24 nodes: a placement exists, but hardly any."""
    rng = random.Random(seed)
    memory: dict[int, int] = {}
    for _ in range(3):
        cuts = sorted(rng.sample(range(1, 100), 7))
        memory |= {len(memory) + i: b - a for i, (a, b) in enumerate(zip([0, *cuts], [*cuts, 100], strict=True))}
    nodes = list(memory)
    rng.shuffle(nodes)
    times = dict.fromkeys(nodes, 1)
    edges = dict.fromkeys(itertools.pairwise(nodes), 1)
    for algorithm in ("m-topo", "m-etf"):
        assert place(times, memory, edges, devices=3, capacity=100, algorithm=algorithm).memory == (100, 100, 100)


def test_remote_inputs_can_make_apart_what_would_fit_together() -> None:
    times, memory = {"a": 1, "b": 1}, {"a": 4, "b": 4}
    sizes = {("a", "b"): 3}
    assert place(times, memory, {("a", "b"): 1}, devices=2, capacity=[4, 7], edge_bytes=sizes).memory == (4, 7)
    with pytest.raises(PlacementInfeasible, match="each device lacks 1 B"):
        place(times, memory, {("a", "b"): 1}, devices=2, capacity=[4, 6], edge_bytes=sizes)
    assert place(times, memory, {("a", "b"): 1}, devices=2, capacity=[1, 8], edge_bytes=sizes).memory == (0, 8)


def test_a_large_instance_that_cannot_fit_is_refused_soon() -> None:
    memory = dict.fromkeys(range(401), 10)
    with pytest.raises(PlacementInfeasible, match="all nodes take") as caught:
        place(memory, memory, {}, devices=4, capacity=1002)
    assert caught.value.proven
    assert caught.value.lacking_bytes == 8


def test_where_the_search_is_given_up_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hydra_tune.graph.placement.repair.STEPS", 10)
    memory = dict(enumerate([16, 16, 14, 14, 12, 12, 8, 8, 6, 4]))
    with pytest.raises(
        PlacementInfeasible, match="found no placement of 10 groups of nodes, although there may"
    ) as caught:
        place(memory, memory, {}, devices=3, capacity=[37, 37, 36])
    assert not caught.value.proven


def test_room_is_what_it_was_after_groups_come_and_go() -> None:
    rng = random.Random(3)
    times = dict.fromkeys(range(10), 1)
    edges = {(u, v): 1 for v in range(10) for u in range(v) if rng.random() < 0.4}
    sizes = {edge: rng.randint(1, 9) for edge in edges}
    problem = read_problem(times, times, edges, devices=3, capacity=99, edge_bytes=sizes, groups=[{0, 4}, {4, 7}])
    room = Room.of(problem, [rng.randrange(3) for _ in problem.members])
    free, where = list(room.free), list(room.where)
    assert [99 - size for size in room.used] == free
    order = rng.sample(range(len(where)), len(where))
    for group in order:
        room.take(group)
    assert room.free == [99] * 3
    assert set(room.where) == {NOWHERE}
    for group in reversed(order):
        room.put(group, where[group])
    assert room.free == free
