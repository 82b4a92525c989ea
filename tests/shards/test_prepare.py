"""What becomes of a shard's activations, and costs that cover more batches than the first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hydra_tune.graph.costs import NodeCost, ShardCost, covering, judging, shard_cost
from hydra_tune.graph.partition import MIB
from hydra_tune.shards.prepare import SPILL_BYTES_PER_SECOND, TRANSFER_SHARE, recompute

pytestmark = pytest.mark.smoke

SPILLED = 2 * MIB / SPILL_BYTES_PER_SECOND
"""Seconds to write and read the activations of one shard below."""


def shards(*forward_seconds: float) -> list[ShardCost]:
    """Shards of one node with 1 MiB of activations and 2 MiB of state."""
    nodes = [
        NodeCost(
            name=str(index), forward_seconds=seconds, backward_seconds=0.0, step_seconds=0.0, parameter_bytes=2 * MIB,
            optimizer_bytes=0, buffer_bytes=0, largest_parameter_bytes=0, activation_bytes=MIB, forward_peak_bytes=0,
            backward_peak_bytes=0, boundary_bytes=0,
        )
        for index, seconds in enumerate(forward_seconds)
    ]  # fmt: skip
    return [shard_cost(nodes, index, index + 1) for index in range(len(nodes))]


def budget(shards: float) -> int:
    """For the largest shard and the activations of so many others."""
    return int((3 + shards) * MIB / (1 - TRANSFER_SHARE)) + 1


def test_what_is_slow_to_compute_is_spilled_and_what_is_quick_is_computed_again() -> None:
    costs = shards(0.5 * SPILLED, 2 * SPILLED, 0.5 * SPILLED, 0.5 * SPILLED)
    assert recompute(costs, budget(0)) == {0, 2}, "of the last shard nothing is needed later"


def test_what_fits_is_kept_the_last_shards_first() -> None:
    costs = shards(*[0.5 * SPILLED] * 5)
    assert recompute(costs, budget(0)) == {0, 1, 2, 3}
    assert recompute(costs, budget(1)) == {0, 1, 2}
    assert recompute(costs, budget(3)) == {0}
    assert recompute(costs, budget(4)) == set()
    assert recompute(costs[:1], budget(0)) == set()


def test_costs_that_cover_two_batches_take_what_the_larger_one_takes() -> None:
    first = NodeCost(
        name="n", forward_seconds=1.0, backward_seconds=1.0, step_seconds=0.0, parameter_bytes=5, optimizer_bytes=0,
        buffer_bytes=0, largest_parameter_bytes=5, activation_bytes=10, forward_peak_bytes=4, backward_peak_bytes=6,
        boundary_bytes=8, saved_input_bytes=3, stepless_peak_bytes=5,
    )  # fmt: skip
    larger = replace(
        first, activation_bytes=20, forward_peak_bytes=8, backward_peak_bytes=12, boundary_bytes=16, saved_input_bytes=6
    )
    assert covering(first, larger) == larger == covering(larger, first)
    again = replace(first, forward_seconds=9.0)
    assert covering(first, again) == first, "another clock is no reason for another cut"
    wider = replace(first, boundary_bytes=9, activation_bytes=2, saved_input_bytes=1, stepless_peak_bytes=7)
    both = covering(first, wider)
    assert both == covering(wider, first)
    assert (both.boundary_bytes, both.activation_bytes) == (9, 10)
    assert (both.saved_input_bytes, both.stepless_peak_bytes) == (1, 7)
    judged = judging(first, larger)
    assert judged == replace(first, forward_peak_bytes=8, boundary_bytes=16), "nothing is kept for a backward"
