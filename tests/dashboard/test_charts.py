"""Chart data computed from columns, compared with the plain definition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_tune.dashboard import charts


def _columns(values: list[tuple[float, ...]], maximize: list[bool]) -> Any:
    """What the charts use of a study whose trials have all completed."""
    array = np.array(values, dtype=float).reshape(len(values), len(maximize))
    complete = np.ones(len(values), dtype=bool)
    return SimpleNamespace(values=array, complete=complete, maximize=maximize, size=len(values))


few = st.integers(min_value=0, max_value=6).map(float)


@pytest.mark.smoke
@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(few, few, few), max_size=25), st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_the_pareto_front_is_what_nothing_dominates(
    values: list[tuple[float, ...]], maximize: tuple[bool, ...]
) -> None:
    signs = [-1 if most else 1 for most in maximize]
    losses = [[sign * value for sign, value in zip(signs, row, strict=True)] for row in values]

    def dominated(i: int) -> bool:
        return any(
            all(a <= b for a, b in zip(other, losses[i], strict=True)) and other != losses[i] for other in losses
        )

    expected = [i for i in range(len(values)) if not dominated(i)]
    assert charts.best_trials(_columns(values, list(maximize))).tolist() == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(few), max_size=40), st.booleans())
def test_records_beat_all_before_them(values: list[tuple[float]], maximize: bool) -> None:
    found = charts.records(_columns(values, [maximize])).tolist()
    numbers = [value if maximize else -value for (value,) in values]
    assert found == [i for i, value in enumerate(numbers) if all(value > before for before in numbers[:i])]
    if values:
        best = charts.best_trial(_columns(values, [maximize]))
        assert best == found[-1]


def test_a_sample_keeps_the_best_and_spreads_over_the_rest() -> None:
    columns = _columns([(float(i % 997),) for i in range(20_000)], [True])
    rows = charts.sample(columns, 500)
    assert 450 <= len(rows) <= 500
    assert {996, 996 + 997} <= set(rows.tolist())
    gaps = np.diff(rows)
    assert gaps.max() < 100


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(min_value=0, max_value=9.9), min_size=1, max_size=20, unique=True), st.integers(1, 40))
def test_busy_shares_add_up_to_the_work(starts: list[float], bins: int) -> None:
    ordered = sorted(starts)
    spans = [(began, 0.9 * (after - began)) for began, after in zip(ordered, [*ordered[1:], 10.0], strict=True)]
    shares = charts.busy_shares(spans, 0.0, 10.0, bins)
    assert all(0 <= share <= 1 for share in shares)
    assert sum(shares) * 10 / bins == pytest.approx(sum(seconds for _, seconds in spans), abs=1e-6)


@pytest.mark.smoke
def test_numbers_that_json_lacks_become_words() -> None:
    given = {"a": float("inf"), "b": [float("nan"), np.float64(1.5)], "c": (np.int64(3), None, True), 4: object}
    assert charts.plain(given) == {"a": "inf", "b": ["nan", 1.5], "c": [3, None, True], "4": str(object)}
