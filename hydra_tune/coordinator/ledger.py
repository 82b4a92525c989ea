"""Records state changes of trials and attempts, each checked against the table of states first.

The ledger is the only owner of these states while a search runs. A change that the table does not allow, such as a
second end of an attempt, is a programming error: it raises, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from hydra_tune.core.states import Outcome, Status, check_change
from hydra_tune.storage.queries import AttemptRecord
from hydra_tune.storage.records import StudyRecords


class Ledger:
    """Records the trials and attempts of one study."""

    def __init__(self, records: StudyRecords) -> None:
        self._records = records
        self._trials: dict[Hashable, Status] = {}
        self._attempts: dict[Hashable, Status] = {}

    def trial_started(self, number: int, seed: int) -> None:
        """Record a new trial."""
        _change("trial", self._trials, number, Status.RUNNING)
        self._records.trial(number, seed=seed, status=Status.RUNNING.value)

    def trial_taken_up(self, number: int, seed: int, attempts: list[AttemptRecord]) -> None:
        """Record that a trial of an earlier run continues, and that its last attempt was interrupted."""
        self.trial_started(number, seed)
        for attempt in attempts:
            self._attempts[attempt.attempt_id] = Status(attempt.state)
            if attempt.state == Status.RUNNING:
                self.attempt_ended(attempt.attempt_id, Outcome(Status.INTERRUPTED, error="its search ended"))

    def trial_ended(self, number: int, outcome: Outcome, **facts: Any) -> None:
        """Record the trial's outcome and measurements."""
        _change("trial", self._trials, number, outcome.status)
        self._records.trial(number, status=outcome.status.value, error=outcome.error, **facts)

    def attempt_started(self, number: int, attempt: int) -> str:
        """Record the trial's `attempt`-th attempt and return the attempt's id."""
        id = self._records.attempt_started(number, attempt, "", 0)
        _change("attempt", self._attempts, id, Status.RUNNING)
        return id

    def attempt_ended(self, id: str, outcome: Outcome) -> None:
        """Record the end of an attempt, which can happen only once."""
        _change("attempt", self._attempts, id, outcome.status)
        self._records.attempt_ended(id, outcome.status.value, outcome.error, outcome.traceback)


def _change(what: str, states: dict[Hashable, Status], key: Hashable, after: Status) -> None:
    check_change(what, states.get(key), after)
    states[key] = after
