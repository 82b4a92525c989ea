"""One attempt at a trial: builds its candidate, trains it by a strategy, and returns the outcome.

The strategy sees it as a `TrialRun`, whose calls go to the study, the display and the trial's facts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra_tune.coordinator.building import Building
from hydra_tune.coordinator.deadlines import Deadlines
from hydra_tune.coordinator.settings import SearchSettings
from hydra_tune.coordinator.trial_facts import TrialFacts
from hydra_tune.coordinator.trial_study import TrialStudy
from hydra_tune.core.errors import CandidateError, NoRoom, WorkerLost, nearest
from hydra_tune.core.states import Outcome, Status
from hydra_tune.engine.remaining import Survival, expected_remaining
from hydra_tune.engine.unit import Failure, StepRecord, TrialEnded, UnitFailed, UnitHung, summed
from hydra_tune.spill.places import SpillFull
from hydra_tune.strategies.base import Interrupted, Pruned, Strategy, TrialRun
from hydra_tune.training.builds import Blueprint
from hydra_tune.training.checkpoint_files import CHECKPOINT_SHARE
from hydra_tune.training.progress import Progress
from hydra_tune.training.remote_trial import TrialInfo

logger = logging.getLogger(__name__)

PUT_OFF = 3.0
"""A checkpoint that would have to wait is postponed to this many checkpoint intervals after the last."""
STOPPED = "stopped on request"
"""Error text in the record of a trial that was stopped on request."""


@dataclass(kw_only=True)
class Attempt(TrialRun):
    """One attempt at a trial, connected to the study and the display."""

    info: TrialInfo
    facts: TrialFacts
    strategy: Strategy
    settings: SearchSettings
    study: TrialStudy
    building: Building
    deadlines: Deadlines
    survival: Survival
    stopping: Callable[[], bool]
    """True if the search is being stopped."""
    ends_now: Callable[[], bool]
    """True if running trials are to end with the epochs they have."""
    on_progress: Callable[[int, Blueprint, Progress], None]
    show: Callable[[str], None]
    directory_losses: Callable[[], int]
    """Times that a directory of this run was found to be removed, and was made again."""
    on_room: Callable[[], None]
    """Called when more trials than before may be in flight."""
    judged: list[tuple[float, ...]] = field(default_factory=list)
    """Values of the search's metrics by epoch."""
    _third: int | None = None
    """Tercile of its last value among all trials that reported at that epoch: 0 for the best third, 2 for the worst."""
    _saved: float = field(default_factory=time.monotonic)
    _save_seconds: float = 0.0

    async def run(self) -> Outcome:
        """Build and train; raise Interrupted, or NoRoom if the search cannot go on."""
        before = self.directory_losses()
        try:
            built, self.candidacy = await self.building.build(self.info)
            if built.values is not None:
                return Outcome(Status.COMPLETE, built.values)
            assert built.blueprint is not None
            self.blueprint = built.blueprint
            return await self._train()
        except Pruned:
            return Outcome(Status.PRUNED, error=STOPPED if self.number in self.study.stopped else "")
        except CandidateError as error:
            return Outcome(Status.FAILED, error=str(error))
        except UnitFailed as error:
            if self.directory_losses() != before:
                return Outcome(Status.LOST, error="a directory of the search was removed")
            if error.failure.ours and error.failure.kind in (NoRoom.__name__, SpillFull.__name__):
                raise NoRoom(error.failure.message) from error
            if error.failure.status == Status.INTERRUPTED:
                raise Interrupted from error
            return outcome_of(error.failure)
        except TrialEnded as error:
            return Outcome(Status(error.status), error=str(error))
        except UnitHung as error:
            return Outcome(Status.HUNG, error=str(error), traceback=error.stacks)
        except WorkerLost as error:
            doing = "while it trained" if self.facts.trained else "while it ran your build function"
            return Outcome(Status.LOST, error=f"{error} ({doing})")

    async def _train(self) -> Outcome:
        self.facts.trained = True
        for metric in self.settings.metrics:
            if metric not in self.blueprint.metrics:
                raise CandidateError(f"the candidate has no metric {metric!r}", nearest(metric, self.blueprint.metrics))
        whole_because = self.blueprint.whole_because
        if whole_because and self.strategy.cuts() and not self.strategy.plans:
            raise CandidateError(f"the candidate cannot be cut: {whole_because}", "use strategy 'whole' or 'auto'")
        await self.strategy.train(self)
        if self.blueprint.keep == "best":
            best = max if self.maximize else min
            return Outcome(Status.COMPLETE, best(self.judged, key=lambda values: values[0]))
        return Outcome(Status.COMPLETE, self.judged[-1])

    # Called by the strategy

    def deadline(self, kind: str) -> float | None:
        return self.deadlines.of(kind)

    def measured(self, kind: str, seconds: float) -> None:
        self.deadlines.measured(kind, seconds)

    def progress(self, progress: Progress) -> None:
        self.on_progress(self.number, self.blueprint, progress)

    def remaining(self, progress: Progress) -> float | None:
        if not progress.batches_done:
            return None
        per_epoch = progress.batches * progress.seconds / progress.batches_done
        epoch = progress.epoch + progress.batch / progress.batches
        return expected_remaining(per_epoch, epoch, self.blueprint.epochs, self.survival, self._third)

    def planned(self, strategy: str, shards: int, plan: dict[str, Any] | None = None) -> None:
        self.facts.strategy, self.facts.shards, self.facts.plan = strategy, shards, plan

    async def bring(self, *, apart: bool, anew: bool) -> None:
        self.judged.clear()
        self._third = None
        self.candidacy = await self.building.bring(
            self.info, self.candidacy, apart=apart, anew=anew, memory=self.memory
        )

    async def suggest(self, name: str, choices: Sequence[str]) -> str:
        try:
            return await self.study.suggest(self.number, self.attempt, name, choices)
        except ValueError as error:
            raise CandidateError(
                f"parameter {name!r} cannot be what the sampler chooses a strategy by ({error})",
                f"give a parameter of yours that is called {name!r} another name",
            ) from error

    def chosen(self, strategy: str, choice: dict[str, Any]) -> None:
        self.facts.chosen(strategy, choice)

    def took(self, batch_seconds: float) -> None:
        self.facts.took(batch_seconds)

    def worked(self, device: str, steps: Sequence[StepRecord]) -> None:
        self.study.record_steps(self.number, self.attempt, device, summed(steps))

    def spilled(self, read: int, written: int) -> None:
        self.facts.read_bytes += read
        self.facts.written_bytes += written

    def communicated(self, size: int) -> None:
        self.facts.communicated_bytes += size

    def note(self, kind: str, message: str) -> None:
        logger.info("trial %d: %s", self.number, message)
        self.study.record_event(self.number, kind, message)

    async def report(self, epoch: int, metrics: dict[str, float]) -> None:
        pruned = await self._record(epoch, metrics)
        self.survival.reported(epoch, self._third, pruned=pruned)
        self._third = self.survival.place(epoch, self.judged[-1][0])
        if pruned:
            raise Pruned

    async def restored(self, history: list[dict[str, float]], notes: tuple[str, ...]) -> None:
        self._saved = time.monotonic()  # nothing to save before training begins
        for note in notes:
            self.note("checkpoint", note)
        for epoch, metrics in enumerate(history):
            await self._record(epoch, metrics)
            self._third = self.survival.place(epoch, self.judged[-1][0])

    async def _record(self, epoch: int, metrics: dict[str, float]) -> bool:
        self.judged.append(tuple(metrics[name] for name in self.settings.metrics))
        return await self.study.epoch(self.number, epoch, metrics)

    def checkpoint_due(self, *, waits: bool = False) -> bool:
        pause = max(self.settings.checkpoint_seconds, self._save_seconds / CHECKPOINT_SHARE)
        since = time.monotonic() - self._saved
        return self.stopping() or since > (PUT_OFF * pause if waits else pause)

    def checkpoint_made(self, step: int, size: int, seconds: float) -> None:
        self._saved, self._save_seconds = time.monotonic(), seconds
        self.facts.checkpoints += 1
        self.study.record_checkpoint(self.number, step, size, seconds)

    def checkpoint_failed(self, reason: str) -> None:
        self._saved = time.monotonic()
        self.show(f"trial {self.number} is not checkpointed: {reason}")
        self.study.record_event(self.number, "checkpoint", reason)

    def stop_here(self) -> None:
        if self.number in self.study.stopped:
            raise Pruned
        if self.stopping():
            raise Interrupted

    def room_for_more(self) -> None:
        self.on_room()

    def out_of_time(self) -> bool:
        return self.ends_now()


def outcome_of(failure: Failure) -> Outcome:
    """Return the trial's outcome for a failed unit."""
    status = Status(failure.status) if failure.status else Status.FAILED
    if status is Status.PRUNED:
        return Outcome(status)
    if failure.ours:
        return Outcome(status, error=failure.message)
    error = f"{failure.kind}: {failure.message}"
    return Outcome(status, error=error, traceback=failure.traceback, classes=failure.classes)
