"""Runs the trials of one search, each in attempts, until it ends or a retry makes no sense."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass, field
from pathlib import Path

from hydra_tune.coordinator.attempt import Attempt
from hydra_tune.coordinator.building import Building
from hydra_tune.coordinator.deadlines import Deadlines
from hydra_tune.coordinator.files import StudyFiles
from hydra_tune.coordinator.retries import Failed, RetryPolicy
from hydra_tune.coordinator.settings import SearchSettings
from hydra_tune.coordinator.study import Asked
from hydra_tune.coordinator.study_thread import StudyThread
from hydra_tune.coordinator.trial_facts import TrialFacts
from hydra_tune.core.states import Outcome, Status
from hydra_tune.engine.engine import Engine
from hydra_tune.engine.remaining import Survival
from hydra_tune.planner.admission import Admission
from hydra_tune.strategies.base import Interrupted, Strategy
from hydra_tune.training.builds import Blueprint
from hydra_tune.training.checkpoint_files import CheckpointFiles
from hydra_tune.training.progress import Progress
from hydra_tune.training.remote_trial import TrialInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ended:
    """A trial that has ended and been reported to Optuna; its files can be removed once that is on disk."""

    outcome: Outcome
    trained: bool
    surplus: list[int]


@dataclass
class TrialRunner:
    """Runs the trials of one search and keeps measurements that serve later trials."""

    settings: SearchSettings
    source_file: str
    strategy: Strategy
    engine: Engine
    study: StudyThread
    stopping: Callable[[], bool]
    out_of_time: Callable[[], bool]
    """True if running trials are to end with the epochs they have."""
    on_candidates: Callable[[], None]
    """Called when `build` is known to return candidates."""
    on_progress: Callable[[int, Blueprint, Progress], None]
    show: Callable[[str], None]
    directory_losses: Callable[[], int]
    """Times that a directory of this run was found to be removed, and was made again."""
    profiles: Path
    """Directory of the measured costs of models."""
    admission: Admission
    on_room: Callable[[], None] = lambda: None
    """Called when more trials than before may be in flight."""
    look_at_spill: Callable[[], Awaitable[None]] | None = None
    """Counts the bytes in the spill store now."""
    at_once: int = 1
    """Most trials on the devices at the same time."""
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    facts: dict[int, TrialFacts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.deadlines = Deadlines(self.settings.deadline)
        self.survival = Survival(
            pruner=self.settings.pruner not in (None, "none"), maximize=self.settings.directions[0] == "maximize"
        )
        self.building = Building(self.engine, self.strategy, self.source_file, self.deadlines, self.on_candidates)

    @property
    def files(self) -> StudyFiles:
        return self.study.files

    async def run(self, asked: Asked) -> Ended | None:
        """Run one trial to its end; return None if it was interrupted. Never raises for errors of user code."""
        facts = self.facts[asked.number] = TrialFacts()
        if asked.attempts == 0:
            # Any files here belong to an earlier study that had this number.
            CheckpointFiles(self.files.checkpoints(asked.number)).remove()
        history: list[Failed] = []
        failed: tuple[str, Outcome] | None = None
        for number in range(asked.attempts + 1, 10**6):
            # The end of a lost attempt and the beginning of the next are one transaction.
            info = await self.study.begin_attempt(asked, number, failed)
            before = facts.checkpoints, facts.trained
            try:
                outcome = await self._attempt(info, facts, retried=bool(history)).run()
                if facts.written_bytes and facts.spilled_bytes is None and self.look_at_spill is not None:
                    await self.look_at_spill()  # a short trial ends between two checks
            except Interrupted:
                self.study.end_attempt(info.attempt, Outcome(Status.INTERRUPTED))
                return None
            finally:
                self.engine.drop(info.attempt)
                self.admission.release(asked.number)
            history.append(Failed(outcome.status, progressed=(facts.checkpoints, facts.trained) != before))
            if outcome.status in (Status.COMPLETE, Status.PRUNED) or not self.retries.again(history):
                break
            logger.info("trial %d: %s (%s), retrying", asked.number, outcome.status, outcome.error)
            failed = (info.attempt, outcome)
        return await self._tell(asked.number, info.attempt, outcome)

    async def _tell(self, number: int, attempt: str, outcome: Outcome) -> Ended:
        facts = self.facts.pop(number)
        if not facts.strategy and not self.building.objective_seen:
            facts.strategy = self.strategy.name
        outcome, surplus = await self.study.tell(number, attempt, outcome, **facts.stored())
        return Ended(outcome, facts.trained, surplus)

    def tidy_left_overs(self, going_on: Container[int]) -> None:
        """Remove checkpoints of trials that ended just before their search was killed."""
        for number in self.files.checkpointed():
            if number not in going_on:
                CheckpointFiles(self.files.checkpoints(number)).remove()

    def tidy(self, number: int, ended: Ended) -> None:
        """Remove the files that an ended trial no longer needs; its end must be on disk already."""
        CheckpointFiles(self.files.checkpoints(number)).remove()
        if ended.trained:
            for other in ended.surplus if ended.outcome.status is Status.COMPLETE else [number]:
                self.files.weights(other).unlink(missing_ok=True)

    def _attempt(self, info: TrialInfo, facts: TrialFacts, *, retried: bool) -> Attempt:
        return Attempt(
            number=info.number, seed=info.seed, attempt=info.attempt, info=info, facts=facts,
            metric=self.settings.metrics[0], maximize=self.settings.directions[0] == "maximize",
            weights=self.files.weights(info.number), checkpoints=self.files.checkpoints(info.number),
            profiles=self.profiles, engine=self.engine, at_once=self.at_once, strategy=self.strategy,
            settings=self.settings, study=self.study, building=self.building, deadlines=self.deadlines,
            survival=self.survival, stopping=self.stopping, ends_now=self.out_of_time, on_progress=self.on_progress,
            show=self.show, directory_losses=self.directory_losses, on_room=self.on_room,
            retried=retried,
        )  # fmt: skip
