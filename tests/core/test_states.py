"""The table of states, the ledger that enforces it, the retry policy and the deadlines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from optuna.study import StudyDirection

from hydra_tune.coordinator.deadlines import LEAST_BUILD_SECONDS, LEAST_SECONDS, Deadlines
from hydra_tune.coordinator.ledger import Ledger
from hydra_tune.coordinator.retries import Failed, RetryPolicy
from hydra_tune.core.states import CHANGES, ENDS, OPTUNA_STATE, Outcome, Status, check_change
from hydra_tune.storage import HydraStorage, StudyRecords, open_storage
from hydra_tune.storage.queries import trial_attempts, trial_records

pytestmark = pytest.mark.smoke


def test_every_state_is_in_the_table_and_ends_are_final() -> None:
    assert CHANGES["trial"].keys() == {None, Status.RUNNING, *ENDS}
    assert CHANGES["attempt"].keys() == {None, *Status}
    assert OPTUNA_STATE.keys() == {Status.RUNNING, *ENDS}
    for what in CHANGES:
        check_change(what, None, Status.RUNNING)
        check_change(what, Status.RUNNING, Status.COMPLETE)
        for end, after in itertools.product(ENDS, Status):
            with pytest.raises(ValueError, match=f"no {what} can go from {end} to {after}"):
                check_change(what, end, after)
        with pytest.raises(ValueError, match="from None to COMPLETE"):
            check_change(what, None, Status.COMPLETE)
    check_change("attempt", Status.RUNNING, Status.INTERRUPTED)
    with pytest.raises(ValueError, match="no trial can go from RUNNING to INTERRUPTED"):
        check_change("trial", Status.RUNNING, Status.INTERRUPTED)


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[HydraStorage]:
    with open_storage(f"sqlite:///{tmp_path}/x.db") as opened:
        study_id = opened.create_new_study([StudyDirection.MINIMIZE], "s")
        for _ in range(2):
            opened.create_new_trial(study_id)
        yield opened


def test_the_ledger_refuses_what_the_table_does_not_allow_and_writes_nothing(storage: HydraStorage) -> None:
    ledger = Ledger(StudyRecords(storage, 1))
    ledger.trial_started(0, seed=1)
    with pytest.raises(ValueError, match="no trial can go from RUNNING to RUNNING"):
        ledger.trial_started(0, seed=2)
    with pytest.raises(ValueError, match="no trial can go from None to FAILED"):
        ledger.trial_ended(1, Outcome(Status.FAILED))
    first = ledger.attempt_started(0, 1)
    ledger.attempt_ended(first, Outcome(Status.LOST, error="killed"))
    second = ledger.attempt_started(0, 2)
    ledger.attempt_ended(second, Outcome(Status.COMPLETE))
    ledger.trial_ended(0, Outcome(Status.COMPLETE))
    for late in (Outcome(Status.COMPLETE), Outcome(Status.INTERRUPTED), Outcome(Status.RUNNING)):
        with pytest.raises(ValueError, match=f"no attempt can go from LOST to {late.status}"):
            ledger.attempt_ended(first, late)
    with pytest.raises(ValueError, match="no trial can go from COMPLETE to FAILED"):
        ledger.trial_ended(0, Outcome(Status.FAILED))
    assert [record.state for record in trial_records(storage, "s")] == ["COMPLETE", "RUNNING"]
    assert [attempt.state for attempt in trial_attempts(storage, "s", 0)] == ["LOST", "COMPLETE"]


def test_a_trial_that_is_taken_up_has_its_open_attempt_interrupted(storage: HydraStorage) -> None:
    killed = Ledger(StudyRecords(storage, 1))
    killed.trial_started(0, seed=1)
    ended, left = (killed.attempt_started(0, number) for number in (1, 2))
    killed.attempt_ended(ended, Outcome(Status.HUNG))
    ledger = Ledger(StudyRecords(storage, 1))
    ledger.trial_taken_up(0, 1, trial_attempts(storage, "s", 0))
    assert [attempt.state for attempt in trial_attempts(storage, "s", 0)] == ["HUNG", "INTERRUPTED"]
    for attempt in (ended, left):
        with pytest.raises(ValueError, match="no attempt can go from"):
            ledger.attempt_ended(attempt, Outcome(Status.COMPLETE))


@pytest.mark.parametrize(
    ("history", "again"),
    [
        ([Failed(Status.FAILED)], False),
        ([Failed(Status.DIVERGED)], False),
        ([Failed(Status.OUT_OF_MEMORY, progressed=True)], False),
        ([Failed(Status.LOST)], True),
        ([Failed(Status.LOST), Failed(Status.LOST)], False),
        ([Failed(Status.LOST), Failed(Status.HUNG)], True),
        ([Failed(Status.LOST), Failed(Status.HUNG), Failed(Status.LOST)], False),
        ([Failed(Status.LOST), Failed(Status.LOST, progressed=True)], True),
        ([Failed(Status.LOST), Failed(Status.LOST, progressed=True), Failed(Status.LOST)], True),
        ([Failed(Status.LOST, progressed=True), Failed(Status.LOST), Failed(Status.LOST)], False),
    ],
)
def test_retries(history: list[Failed], again: bool) -> None:
    assert RetryPolicy().again(history) is again


def test_deadlines_follow_the_longest_measured_time() -> None:
    deadlines = Deadlines()
    for seconds in (1.0, 2.0):
        deadlines.measured("train", seconds)
    assert deadlines.of("train") is None, "too little is known"
    deadlines.measured("train", 3.0)
    assert deadlines.of("train") == LEAST_SECONDS
    deadlines.measured("train", 50.0)
    assert deadlines.of("train") == 1000
    assert deadlines.of("build") is None
    for _ in range(3):
        deadlines.measured("build", 1.0)
    assert deadlines.of("build") == LEAST_BUILD_SECONDS
    assert Deadlines(7.0).of("build") == 7.0
