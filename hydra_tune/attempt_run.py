"""One attempt at a trial as its strategy sees it: what it says goes to the study, the display and the records."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hydra_tune.checkpoint import CHECKPOINT_SHARE
from hydra_tune.engine.remaining import expected_remaining
from hydra_tune.engine.unit import StepRecord, summed
from hydra_tune.errors import CandidateError
from hydra_tune.planning.admission import Taken, TooMuch
from hydra_tune.planning.choice import Choice
from hydra_tune.planning.survey import Survey
from hydra_tune.remote_trial import TrialInfo
from hydra_tune.strategies.auto import APART, Auto, DoesNotFit
from hydra_tune.strategies.base import Interrupted, Pruned
from hydra_tune.strategies.planned_run import PlannedRun
from hydra_tune.training import Progress

if TYPE_CHECKING:
    from hydra_tune.attempts import TrialRunner

logger = logging.getLogger(__name__)

PUT_OFF = 3.0
"""A checkpoint that would have to wait is put off until it is due for so many times."""
STRATEGY_NOTE = "strategy"
"""A file beside a trial's checkpoints that names the strategy which wrote them."""


@dataclass(kw_only=True)
class AttemptRun(PlannedRun):
    """A strategy's view of an attempt, joined to the study and the display."""

    runner: TrialRunner
    info: TrialInfo
    judged: list[tuple[float, ...]] = field(default_factory=list)
    _third: int | None = None
    """Where it stands among all that have reported at its last epoch."""
    _saved: float = field(default_factory=time.monotonic)
    _save_seconds: float = 0.0

    def deadline(self, kind: str) -> float | None:
        return self.runner.deadlines.of(kind)

    def measured(self, kind: str, seconds: float) -> None:
        self.runner.deadlines.measured(kind, seconds)

    def progress(self, progress: Progress) -> None:
        self.runner.on_progress(self.number, self.blueprint, progress)

    def remaining(self, progress: Progress) -> float | None:
        if not progress.batches_done:
            return None
        per_epoch = progress.batches * progress.seconds / progress.batches_done
        epoch = progress.epoch + progress.batch / progress.batches
        return expected_remaining(per_epoch, epoch, self.blueprint.epochs, self.runner.survival, self._third)

    def planned(self, strategy: str, shards: int, plan: dict[str, Any] | None = None) -> None:
        facts = self.runner.facts[self.number]
        facts.strategy, facts.shards, facts.plan = strategy, shards, plan

    # Of a search that plans its trials

    async def bring(self, *, apart: bool, anew: bool) -> None:
        self.judged.clear()
        self._third = None
        self.candidacy = await self.runner.bring(self, apart=apart, anew=anew)

    async def admit(self, choice: Choice) -> None:
        assert self.planner is not None
        estimate = choice.estimate
        on_devices = estimate.devices * estimate.device_bytes if self.planner.pool.cpu else 0
        spilled = max(0, estimate.host_bytes + estimate.disk_bytes - on_devices)
        try:
            await self.runner.admission.admit(self.number, Taken(on_devices, spilled))
        except TooMuch as error:
            raise DoesNotFit(str(error)) from error

    async def suggest(self, name: str, choices: Sequence[str]) -> str:
        study = self.runner.study
        wanted = (name, (list(choices),), dict[str, Any]())
        try:
            found: str = await study.call(study.study.answer, self.number, self.attempt, "suggest_categorical", wanted)
        except ValueError as error:
            raise CandidateError(
                f"parameter {name!r} cannot be what the sampler chooses a strategy by ({error})",
                f"give a parameter of yours that is called {name!r} another name",
            ) from error
        return found

    def strategy_before(self) -> str:
        note = self.checkpoints / STRATEGY_NOTE
        return note.read_text() if note.exists() and any(self.checkpoints.glob("*.safetensors")) else ""

    def surveyed(self, found: Survey) -> None:
        if self.runner.surveys is not None:
            self.runner.surveys[self.number] = found

    def chosen(self, choice: Choice) -> None:
        facts = self.runner.facts[self.number]
        if facts.choice is not None:
            facts.earlier.append(facts.choice)
        facts.choice, facts.strategy = choice.stored(), choice.strategy
        strategy = self.runner.strategy
        if isinstance(strategy, Auto) and not set(APART).isdisjoint(strategy.names):
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            (self.checkpoints / STRATEGY_NOTE).write_text(choice.strategy)

    def took(self, batch_seconds: float) -> None:
        choice = self.runner.facts[self.number].choice
        assert choice is not None
        choice["measured_batch_ms"] = 1000 * batch_seconds
        choice["time_error"] = 1000 * batch_seconds / choice["predicted_batch_ms"] - 1

    def worked(self, device: str, steps: Sequence[StepRecord]) -> None:
        study = self.runner.study
        study.post(study.study.steps, self.number, self.attempt, device, None, summed(steps))

    def spilled(self, read: int, written: int) -> None:
        facts = self.runner.facts[self.number]
        facts.read_bytes += read
        facts.written_bytes += written

    def communicated(self, size: int) -> None:
        self.runner.facts[self.number].communicated_bytes += size

    def note(self, kind: str, message: str) -> None:
        logger.info("trial %d: %s", self.number, message)
        study = self.runner.study
        study.post(study.study.event, self.number, kind, message)

    async def report(self, epoch: int, metrics: dict[str, float]) -> None:
        pruned = await self._record(epoch, metrics)
        survival = self.runner.survival
        survival.reported(epoch, self._third, pruned=pruned)
        self._third = survival.place(epoch, self.judged[-1][0])
        if pruned:
            raise Pruned

    async def restored(self, history: list[dict[str, float]], notes: tuple[str, ...]) -> None:
        self._saved = time.monotonic()  # there is nothing to save before training begins
        study = self.runner.study
        for note in notes:
            logger.info("trial %d: %s", self.number, note)
            study.post(study.study.event, self.number, "checkpoint", note)
        for epoch, metrics in enumerate(history):
            await self._record(epoch, metrics)
            self._third = self.runner.survival.place(epoch, self.judged[-1][0])

    async def _record(self, epoch: int, metrics: dict[str, float]) -> bool:
        self.judged.append(tuple(metrics[name] for name in self.runner.settings.metrics))
        study = self.runner.study
        return await study.call(study.study.epoch, self.number, epoch, metrics)

    def checkpoint_due(self, *, waits: bool = False) -> bool:
        pause = max(self.runner.settings.checkpoint_seconds, self._save_seconds / CHECKPOINT_SHARE)
        since = time.monotonic() - self._saved
        return self.runner.stopping() or since > (PUT_OFF * pause if waits else pause)

    def checkpoint_made(self, step: int, size: int, seconds: float) -> None:
        self._saved, self._save_seconds = time.monotonic(), seconds
        self.runner.facts[self.number].checkpoints += 1
        study = self.runner.study
        study.post(study.study.checkpoint, self.number, step, size, seconds)

    def checkpoint_failed(self, reason: str) -> None:
        self._saved = time.monotonic()
        self.runner.show(f"trial {self.number} is not checkpointed: {reason}")
        study = self.runner.study
        study.post(study.study.event, self.number, "checkpoint", reason)

    def out_of_time(self) -> bool:
        return self.runner.out_of_time()

    def stop_here(self) -> None:
        if self.number in self.runner.study.study.stopped:
            raise Pruned
        if self.runner.stopping():
            raise Interrupted
