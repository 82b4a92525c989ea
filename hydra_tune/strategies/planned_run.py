"""What a run offers a strategy that chooses others: building anew, waiting for room, and records of the choice."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from hydra_tune.planning.choice import Choice
from hydra_tune.planning.planner import Planner
from hydra_tune.planning.survey import Survey
from hydra_tune.strategies.base import TrialRun


@dataclass
class PlannedRun(TrialRun):
    """One attempt at a trial in a search that plans."""

    planner: Planner | None = None
    """None where the search has one strategy for all trials."""

    @abstractmethod
    async def bring(self, *, apart: bool, anew: bool) -> None:
        """Have the candidate in the builder, or where a device can take it; `anew`: it is built again for that."""

    @abstractmethod
    async def admit(self, choice: Choice) -> None:
        """Wait until there is host memory, or disk, for a trial by that choice."""

    @abstractmethod
    async def suggest(self, name: str, choices: Sequence[str]) -> str:
        """A hyperparameter of ours, chosen by the sampler."""

    @abstractmethod
    def strategy_before(self) -> str:
        """By which strategy the trial's checkpoints were written, where it has some."""

    @abstractmethod
    def surveyed(self, found: Survey) -> None:
        """What a look at the candidate has shown."""

    @abstractmethod
    def chosen(self, choice: Choice) -> None:
        """The trial goes on by this strategy, for this reason."""

    @abstractmethod
    def took(self, batch_seconds: float) -> None:
        """A batch took so long by the strategy that was chosen."""
