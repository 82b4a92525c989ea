"""The table of states, the retry policy and the deadlines: pure decisions."""

from __future__ import annotations

import pytest

from hydra_tune.deadlines import LEAST_BUILD_SECONDS, LEAST_SECONDS, Deadlines
from hydra_tune.retries import Failed, RetryPolicy
from hydra_tune.states import CHANGES, ENDS, OPTUNA_STATE, Status, check_change

pytestmark = pytest.mark.smoke


def test_every_state_is_in_the_table_and_ends_are_final() -> None:
    assert CHANGES.keys() == {None, Status.RUNNING, *ENDS}
    assert OPTUNA_STATE.keys() == {Status.RUNNING, *ENDS}
    check_change(None, Status.RUNNING)
    check_change(Status.RUNNING, Status.COMPLETE)
    for end in ENDS:
        with pytest.raises(ValueError, match=f"cannot go from {end} to RUNNING"):
            check_change(end, Status.RUNNING)
    with pytest.raises(ValueError, match="from None to COMPLETE"):
        check_change(None, Status.COMPLETE)


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
