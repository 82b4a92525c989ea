"""Costs raised to cover more batches than the first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hydra_tune.graph.costs import NodeCost, covering, judging

pytestmark = pytest.mark.smoke


def test_costs_that_cover_two_batches_take_what_the_larger_one_takes() -> None:
    first = NodeCost(
        name="n", forward_seconds=1.0, backward_seconds=1.0, step_seconds=0.0, parameter_bytes=5, optimizer_bytes=0,
        buffer_bytes=0, largest_parameter_bytes=5, activation_bytes=10, forward_peak_bytes=4, backward_peak_bytes=6,
        boundary_bytes=8, saved_input_bytes=3, stepless_peak_bytes=5, unsaved_bytes=4,
    )  # fmt: skip
    larger = replace(
        first, activation_bytes=20, forward_peak_bytes=8, backward_peak_bytes=12, boundary_bytes=16,
        saved_input_bytes=6, unsaved_bytes=8,
    )  # fmt: skip
    assert covering(first, larger) == larger == covering(larger, first)
    again = replace(first, forward_seconds=9.0)
    assert covering(first, again) == first, "another clock is no reason for another cut"
    wider = replace(first, boundary_bytes=9, activation_bytes=2, saved_input_bytes=1, stepless_peak_bytes=7)
    both = covering(first, wider)
    assert both == covering(wider, first)
    assert (both.boundary_bytes, both.activation_bytes) == (9, 10)
    assert (both.saved_input_bytes, both.stepless_peak_bytes) == (1, 7)
    judged = judging(first, larger)
    assert judged == replace(first, forward_peak_bytes=8, boundary_bytes=16, unsaved_bytes=8), (
        "nothing is kept for a backward"
    )
