"""The contract between the search and a strategy.

A strategy is straight-line async code that awaits units. It does not choose devices and does not catch failures: a unit
that fails raises where it is awaited, and the search decides whether the trial is tried again. Being pruned raises too,
from `report`, so that a strategy has nothing to clean up: when its coroutine ends, what it left on devices is dropped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hydra_tune.builds import Blueprint
from hydra_tune.engine.engine import Engine
from hydra_tune.engine.unit import Unit, UnitResult

Report = Callable[[int, dict[str, float]], Awaitable[None]]


class Pruned(Exception):
    """Raised by `report`: the pruner has ended the trial."""


@dataclass(frozen=True)
class Candidacy:
    """Where a built candidate waits: in the worker that built it, or packed for any device."""

    worker: int | None = None
    parcel: bytes | None = None


@dataclass
class TrialRun:
    """One attempt at one trial, as its strategy sees it."""

    number: int
    seed: int
    attempt: str
    blueprint: Blueprint
    candidacy: Candidacy
    metric: str
    maximize: bool
    weights: Path
    """Where the trained weights go."""
    engine: Engine
    report: Report
    """Call at the end of each epoch with all its metrics; raises when the trial is pruned."""
    progress: Callable[[Any], None]
    """Call with each Progress, for the display."""

    async def unit(
        self,
        kind: str,
        work: Callable[..., Any],
        *args: Any,
        worker: int | None = None,
        remaining: float | None = None,
    ) -> UnitResult:
        """Await one unit of this trial."""
        return await self.engine.run(
            Unit(
                trial=self.number, attempt=self.attempt, kind=kind, work=work, args=args, worker=worker,
                remaining=remaining,
            )
        )  # fmt: skip

    def better(self, value: float, than: float | None) -> bool:
        """Whether `value` beats the best so far, in the direction of the search."""
        if than is None:
            return True
        return value > than if self.maximize else value < than


class Strategy(ABC):
    """A way to train a candidate."""

    name: ClassVar[str]
    exact: ClassVar[bool]
    """Whether the result is that of a plain PyTorch loop."""
    summary: ClassVar[str]

    @abstractmethod
    async def train(self, run: TrialRun) -> None:
        """Train the candidate to its last epoch, reporting each, and leave the weights in `run.weights`."""
