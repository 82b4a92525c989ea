"""Fusion makes graphs smaller, and what is placed fused is a placement of the whole graph."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from hydra_tune.graph.placement import PlacementInfeasible, place
from hydra_tune.graph.placement.fuse import fuse
from hydra_tune.graph.placement.problem import read_problem
from tests.graph.placement.test_placers import check, graphs, line

pytestmark = pytest.mark.smoke


def fused_nodes(given: dict[str, Any]) -> list[set[object]]:
    found = fuse(read_problem(**given))
    return [{found.original.nodes[part] for part in parts} for parts in found.parts]


def test_a_chain_becomes_one_node() -> None:
    found = fuse(read_problem(**line(100), devices=2))
    assert found.problem.times == (100,)
    assert found.problem.memory == (100,)
    assert found.problem.before == ((),)


def test_branches_worth_a_device_stay_apart() -> None:
    graph: dict[str, Any] = {
        "times": {"in": 1, "left": 9, "right": 9, "bias": 1, "out": 2},
        "memory": dict.fromkeys(["in", "left", "right", "bias", "out"], 1),
        "edges": {("in", "left"): 1, ("in", "right"): 1, ("left", "out"): 3, ("right", "out"): 3, ("bias", "out"): 2},
        "devices": 2,
    }
    assert fused_nodes(graph) == [{"in"}, {"left"}, {"right"}, {"bias", "out"}]
    assert place(**graph, fused=True).makespan == place(**graph).makespan == 15


def test_what_is_fused_stays_small_under_caps_and_within_groups() -> None:
    assert [len(nodes) for nodes in fused_nodes({**line(8), "devices": 2, "capacity": 8})] == [2, 2, 2, 2]
    assert fused_nodes({**line(4), "devices": 2, "groups": [{1, 2}]}) == [{0}, {1, 2}, {3}]


def test_where_fused_nodes_do_not_fit_single_ones_are_tried() -> None:
    # Pairs take 2 of 8 bytes each; beside a node of 7 only a single one fits.
    given = {**line(9), "devices": 2, "capacity": 8}
    given["memory"] = {**given["memory"], 8: 7}
    assert place(**given, fused=True).memory in {(8, 7), (7, 8)}


@settings(max_examples=200, deadline=None)
@given(given=graphs())
def test_a_fused_placement_keeps_every_promise(given: dict[str, Any]) -> None:
    small = fuse(read_problem(**given))
    assert sorted(part for parts in small.parts for part in parts) == list(range(len(given["times"])))
    assert sum(small.problem.memory) == sum(given["memory"].values())
    assert all(u < v for v, givers in enumerate(small.problem.before) for u, _ in givers), "still topological"
    try:
        placed = place(**given, fused=True)
    except PlacementInfeasible:
        with pytest.raises(PlacementInfeasible):
            place(**given)
        return
    check(placed, given)
