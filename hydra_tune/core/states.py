"""States of trials and attempts, the allowed changes between them, and their Optuna equivalents."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from optuna.trial import TrialState


class Status(StrEnum):
    """State of a trial or an attempt in our own records, finer than Optuna's."""

    RUNNING = "RUNNING"
    COMPLETE = "COMPLETE"
    PRUNED = "PRUNED"
    FAILED = "FAILED"
    """User code raised an exception or returned an unusable value."""
    DIVERGED = "DIVERGED"
    """The loss became NaN or infinite."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    LOST = "LOST"
    """The process that ran the trial ended."""
    HUNG = "HUNG"
    """The trial showed no sign of life before its deadline."""
    INTERRUPTED = "INTERRUPTED"
    """For attempts only: the search was stopped; the trial continues when the study is resumed."""


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
"""Allowed state changes of trials and attempts; None is the state before creation."""


def check_change(what: str, before: Status | None, after: Status) -> None:
    """Raise a ValueError for a state change that `CHANGES` does not allow."""
    if after not in CHANGES[what][before]:
        raise ValueError(f"no {what} can go from {before} to {after}")


# Optuna refuses values with FAIL, and its samplers ignore failed trials: a diverged trial is reported as PRUNED, so
# that the sampler learns to avoid the region.
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
    """The final status of a trial, with its values or its error."""

    status: Status
    values: tuple[float, ...] | None = None
    error: str = ""
    traceback: str = ""
    classes: tuple[str, ...] = ()
    """Full names of the error's class and its bases, if user code raised it."""
