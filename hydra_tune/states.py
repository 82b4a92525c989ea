"""What can become of a trial, and what Optuna is told of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from optuna.trial import TrialState


class Status(StrEnum):
    """A trial's state in our own records, finer than Optuna's."""

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
}


@dataclass(frozen=True)
class Outcome:
    """How a trial ended."""

    status: Status
    values: tuple[float, ...] | None = None
    error: str = ""
    traceback: str = ""
