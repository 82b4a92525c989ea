"""Expected remaining time: exact without a pruner, shorter with one, and learnt from the study's reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydra_tune.engine.remaining import Survival, expected_remaining

pytestmark = pytest.mark.smoke


def studied(reports: dict[int, tuple[int, int]]) -> Survival:
    """Return the survival in a study with a pruner, from the reports and the pruned trials of each epoch."""
    survival = Survival(pruner=True)
    for epoch, (reported, pruned) in reports.items():
        for number in range(reported):
            survival.reported(epoch, pruned=number < pruned)
    return survival


@pytest.mark.parametrize(("epoch", "seconds"), [(0, 50.0), (2.5, 25.0), (4, 10.0), (4.9, 1.0), (5, 0.0), (7, 0.0)])
def test_without_a_pruner_it_is_the_time_left(epoch: float, seconds: float) -> None:
    survival = Survival(pruner=False)
    survival.reported(0)
    assert survival.probability(0) == 1.0
    assert expected_remaining(10.0, epoch, 5, survival) == pytest.approx(seconds)


def test_later_epochs_count_as_often_as_trials_come_to_them() -> None:
    survival = studied({0: (1000, 500), 1: (500, 250), 2: (250, 0)})
    first, second, third = (survival.probability(epoch) for epoch in range(3))
    assert first == pytest.approx(0.5, abs=0.01)
    assert third == pytest.approx(1.0, abs=0.01)
    assert expected_remaining(10.0, 0.5, 4, survival) == pytest.approx(
        5 + 10 * (first + first * second + first * second * third)
    )
    assert expected_remaining(10.0, 3, 4, survival) == 10.0, "no report before the end of the last epoch ends it"


def test_an_epoch_without_reports_is_taken_as_the_study_is_so_far() -> None:
    assert studied({}).probability(3) == pytest.approx(0.9)
    assert studied({0: (1000, 600)}).probability(7) == pytest.approx(0.4, abs=0.01)
    one = studied({0: (1, 1)}).probability(0)
    assert 0.6 < one < 0.8, "one pruned trial is no verdict"


def test_a_trial_before_a_hard_rung_counts_less_than_one_that_has_passed_it() -> None:
    survival = studied({1: (100, 75), 2: (25, 0), 3: (25, 0)})
    assert expected_remaining(10.0, 1, 8, survival) < expected_remaining(10.0, 2, 8, survival)


def test_a_trial_of_the_worst_third_counts_less_once_such_trials_were_pruned() -> None:
    survival = Survival(pruner=True)
    for _ in range(20):
        for third in range(3):
            survival.reported(1, third, pruned=third == 2)
    best, middle, worst = (survival.probability(1, third) for third in range(3))
    assert worst < 0.3 < 0.6 < survival.probability(1) < 0.9 < middle == best
    assert expected_remaining(10.0, 1, 8, survival, 2) < 0.4 * expected_remaining(10.0, 1, 8, survival, 0)
    assert survival.probability(5, 2) < survival.probability(5) < survival.probability(5, 0), "at other epochs too"


@pytest.mark.parametrize("maximize", [False, True])
def test_a_place_is_a_third_of_what_was_reported_at_the_epoch(maximize: bool) -> None:
    survival = Survival(pruner=True, maximize=maximize)
    assert [survival.place(0, value) for value in (5.0, 1.0, 4.0, 2.0, 3.0)] == [None] * 5, "few"
    assert survival.place(0, 6.0) == (0 if maximize else 2)
    assert survival.place(0, 0.0) == (2 if maximize else 0)
    assert survival.place(0, 3.5) == 1
    assert survival.place(1, 3.5) is None, "another epoch"
    assert Survival(pruner=False).place(0, 1.0) is None


@given(
    st.dictionaries(st.integers(0, 9), st.integers(0, 20).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))),
    st.floats(0, 10),
    st.integers(1, 10),
)
def test_it_lies_between_this_epochs_end_and_all_epochs(
    reports: dict[int, tuple[int, int]], epoch: float, epochs: int
) -> None:
    survival = studied(reports)
    assert all(0 < survival.probability(e) <= 1 for e in range(10))
    expected = expected_remaining(2.0, epoch, epochs, survival)
    longest = max(0.0, 2.0 * (epochs - epoch))
    assert 0 <= expected <= longest + 1e-9
    if epoch < epochs:
        assert expected >= 2.0 * (int(epoch) + 1 - epoch)
