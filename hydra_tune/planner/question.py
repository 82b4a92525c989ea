"""Question and answer of a candidate's survey, as plain data.

The coordinator asks and reads; `survey.py`, in the worker that has the candidate, measures.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydra_tune.strategies.estimate import Estimate
from hydra_tune.strategies.pool import Pool


@dataclass(frozen=True)
class Question:
    """The question for a survey."""

    pools: tuple[Pool, ...]
    among: tuple[str, ...]
    soon_done: float = 0.0
    """Seconds of training below which only the plain loop is surveyed if it fits, and else only shards."""
    insist: bool = True
    """True if a candidate that cannot be rehearsed is surveyed anyway, with its own loss and metrics."""


@dataclass(frozen=True)
class Survey:
    """The answer of a survey: estimates for each requested pool."""

    estimates: tuple[tuple[Estimate, ...], ...]
    epochs: int
    batches: int
    seconds: float
    """Seconds that the survey took."""
    failed: str = ""
    """The error, if there are no estimates."""
    stays: bool = False
    """True if the candidate cannot be sent to another process: only a device that builds it can train it."""
