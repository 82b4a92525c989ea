"""What can become of a trial, and what Optuna is told of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from optuna.trial import TrialState


class Status(StrEnum):
    """A trial's state in our own records, finer than Optuna's; attempts at a trial have the same."""

    RUNNING = "RUNNING"
    COMPLETE = "COMPLETE"
    PRUNED = "PRUNED"
    FAILED = "FAILED"
    """User code raised, or returned what cannot be used."""
    DIVERGED = "DIVERGED"
    """The loss became NaN or infinite."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    LOST = "LOST"
    """The process that ran it ended."""
    HUNG = "HUNG"
    """It showed no sign of life until its deadline."""
    INTERRUPTED = "INTERRUPTED"
    """Of an attempt only: the search was stopped; the trial goes on when the study is resumed."""


ENDS = frozenset(Status) - {Status.RUNNING, Status.INTERRUPTED}

_FINAL: dict[Status | None, frozenset[Status]] = dict.fromkeys(ENDS, frozenset())

CHANGES: dict[str, dict[Status | None, frozenset[Status]]] = {
    "trial": {None: frozenset({Status.RUNNING}), Status.RUNNING: ENDS, **_FINAL},
    "attempt": {
        None: frozenset({Status.RUNNING}),
        Status.RUNNING: ENDS | {Status.INTERRUPTED},
        Status.INTERRUPTED: frozenset(),
        **_FINAL,
    },
}
"""What a trial and an attempt at one may become; None stands for what is not there yet."""


def check_change(what: str, before: Status | None, after: Status) -> None:
    """A change that the table does not allow is a mistake of the program's."""
    if after not in CHANGES[what][before]:
        raise ValueError(f"no {what} can go from {before} to {after}")


# Optuna refuses values with FAIL, and its samplers ignore failed trials: a diverged trial is told as PRUNED, so that
# the sampler learns to avoid the region.
OPTUNA_STATE = {
    Status.RUNNING: TrialState.RUNNING,
    Status.COMPLETE: TrialState.COMPLETE,
    Status.PRUNED: TrialState.PRUNED,
    Status.DIVERGED: TrialState.PRUNED,
    Status.FAILED: TrialState.FAIL,
    Status.OUT_OF_MEMORY: TrialState.FAIL,
    Status.LOST: TrialState.FAIL,
    Status.HUNG: TrialState.FAIL,
}


@dataclass(frozen=True)
class Outcome:
    """How a trial ended."""

    status: Status
    values: tuple[float, ...] | None = None
    error: str = ""
    traceback: str = ""
