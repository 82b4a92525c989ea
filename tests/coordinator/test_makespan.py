"""The makespan of a search, its lower bound, and the line that reports both."""

from __future__ import annotations

import pytest

from hydra_tune.coordinator.makespan import Makespan


def test_the_bound_is_all_work_spread_evenly_or_the_longest_trial() -> None:
    even = Makespan(2)
    for trial, started in ((0, 0.0), (1, 0.0), (2, 4.0), (3, 5.0)):
        even.add(trial, started, 4.0)
    assert (even.seconds, even.bound) == (9.0, 8.0)
    assert even.line() == ("devices ran for 9.0 s, 1.12 of the least possible (all work spread over 2 devices: 8.0 s)")
    one = Makespan(2)
    one.add(0, 10.0, 6.0)
    one.add(1, 10.0, 1.0)
    assert one.bound == 6.0
    assert one.seconds == pytest.approx(6.0)
    assert "the longest trial: 6.0 s" in one.line()


def test_a_trial_on_two_devices_at_once_is_no_chain() -> None:
    """Whoever chose its strategy, and whichever of its units is heard of first."""
    both = Makespan(2)
    for started in (0.0, 5.0):
        both.add(0, started + 0.5, 4.5)
        both.add(0, started, 4.8)
    both.add(1, 10.0, 2.0)
    assert both.spread == {0}
    assert both.bound == pytest.approx((2 * 9.3 + 2.0) / 2)
    assert both.seconds / both.bound > 1
    moved = Makespan(2)
    moved.add(0, 0.0, 4.0)
    moved.add(0, 4.0, 4.0)
    assert moved.bound == 8.0


def test_a_search_without_units_says_nothing() -> None:
    assert Makespan(2).line() == ""
