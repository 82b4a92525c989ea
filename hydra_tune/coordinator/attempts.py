"""Runs the trials of one search, each in one or more attempts (`attempt.py`), until `retries.py` grants no other."""

from __future__ import annotations

import logging
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Protocol

from hydra_tune.coordinator.files import StudyFiles
from hydra_tune.coordinator.retries import Failed, RetryPolicy
from hydra_tune.coordinator.study import Asked
from hydra_tune.coordinator.study_thread import StudyThread
from hydra_tune.coordinator.trial_facts import TrialFacts
from hydra_tune.core.states import Outcome, Status
from hydra_tune.strategies.base import Interrupted, Strategy
from hydra_tune.training.checkpoint_files import CheckpointFiles
from hydra_tune.training.kept_files import remove
from hydra_tune.training.remote_trial import TrialInfo

logger = logging.getLogger(__name__)


class RunsAttempts(Protocol):
    """Runs attempts: on the devices of this machine, or on the nodes of a cluster."""

    @property
    def objective_seen(self) -> bool:
        """True once `build` is known to be an ordinary objective."""
        ...

    async def run(self, info: TrialInfo, facts: TrialFacts) -> Outcome:
        """Run one attempt to its end; raise Interrupted, Elsewhere, or NoRoom if the search cannot go on."""
        ...


class Elsewhere(Exception):
    """An attempt ended because of its node alone: the trial gets another attempt, which costs no retry."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.error)
        self.outcome = outcome


@dataclass(frozen=True)
class Ended:
    """A trial that has ended and been reported to Optuna; its files can be removed once that is on disk."""

    outcome: Outcome
    trained: bool
    surplus: list[int]


@dataclass
class TrialRunner:
    """Runs the trials of one search."""

    strategy: Strategy
    study: StudyThread
    attempts: RunsAttempts
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    facts: dict[int, TrialFacts] = field(default_factory=dict)

    @property
    def files(self) -> StudyFiles:
        return self.study.files

    async def run(self, asked: Asked) -> Ended | None:
        """Run one trial to its end; return None if it was interrupted. Never raises for errors of user code."""
        facts = self.facts[asked.number] = TrialFacts()
        if asked.attempts == 0:
            # Any files here belong to an earlier study that had this number.
            CheckpointFiles(self.files.checkpoints(asked.number)).remove()
            remove(self.files.kept(asked.number))
        history: list[Failed] = []
        failed: tuple[str, Outcome] | None = None
        for number in range(asked.attempts + 1, 10**6):
            # The end of a lost attempt and the beginning of the next are one transaction.
            info = await self.study.begin_attempt(asked, number, failed)
            facts.retried, before = bool(history), (facts.checkpoints, facts.trained)
            try:
                outcome = await self.attempts.run(info, facts)
            except Interrupted:
                self.study.end_attempt(info.attempt, Outcome(Status.INTERRUPTED))
                return None
            except Elsewhere as error:
                logger.info("trial %d: %s, going on elsewhere", asked.number, error)
                failed = (info.attempt, error.outcome)
                continue
            history.append(Failed(outcome.status, progressed=(facts.checkpoints, facts.trained) != before))
            if outcome.status in (Status.COMPLETE, Status.PRUNED) or not self.retries.again(history):
                break
            logger.info("trial %d: %s (%s), retrying", asked.number, outcome.status, outcome.error)
            failed = (info.attempt, outcome)
        return await self._tell(asked.number, info.attempt, outcome)

    async def _tell(self, number: int, attempt: str, outcome: Outcome) -> Ended:
        facts = self.facts.pop(number)
        if not facts.strategy and not self.attempts.objective_seen:
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
        for other in ended.surplus if ended.outcome.status is Status.COMPLETE else [number]:
            remove(self.files.kept(other))
            if ended.trained:
                self.files.weights(other).unlink(missing_ok=True)
