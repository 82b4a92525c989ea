"""From an asked trial to its outcome: build, train by a strategy, judge, and try again where that makes sense."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra_tune.actions import STOPPED
from hydra_tune.builds import Blueprint, Built, build_and_hold, build_for_device, build_here, pack_held
from hydra_tune.checkpoint import CHECKPOINT_SHARE, Checkpoints
from hydra_tune.deadlines import Deadlines
from hydra_tune.engine.engine import Engine
from hydra_tune.engine.remaining import Survival, expected_remaining
from hydra_tune.engine.spill import SpillFull
from hydra_tune.engine.unit import Failure, Role, StepRecord, TrialEnded, Unit, UnitFailed, UnitHung, UnitResult, summed
from hydra_tune.errors import CandidateError, SpecError, WorkerLost, nearest
from hydra_tune.files import StudyFiles
from hydra_tune.remote_trial import TrialInfo
from hydra_tune.resuming import ALLOW
from hydra_tune.retries import Failed, RetryPolicy
from hydra_tune.settings import SearchSettings
from hydra_tune.states import Outcome, Status
from hydra_tune.strategies.base import Candidacy, Interrupted, Pruned, Strategy, TrialRun
from hydra_tune.strategies.whole import Whole
from hydra_tune.study import Asked
from hydra_tune.study_thread import StudyThread
from hydra_tune.training import Progress
from hydra_tune.weights import NoRoom

logger = logging.getLogger(__name__)


@dataclass
class TrialFacts:
    """What is measured of a trial over all its units."""

    seconds: float = 0.0
    peak_device_bytes: int | None = None
    device: str = ""
    trained: bool = False
    """Whether it has weights and checkpoints."""
    checkpoints: int = 0
    strategy: str = ""
    shards: int = 1
    plan: dict[str, Any] | None = None
    read_bytes: int = 0
    """From the spill store."""
    written_bytes: int = 0
    communicated_bytes: int = 0

    def add(self, unit: Unit, result: UnitResult) -> None:
        if unit.role is Role.DEVICE:
            self.seconds += result.seconds
            self.device = result.device
        if result.peak_bytes is not None:
            self.peak_device_bytes = max(self.peak_device_bytes or 0, result.peak_bytes)


@dataclass(frozen=True)
class Ended:
    """A trial that has ended and been told to Optuna; its files can be tidied once that is on disk."""

    outcome: Outcome
    trained: bool
    surplus: list[int]


@dataclass
class TrialRunner:
    """Runs trials of one search; what it learns from the first ones serves the later ones."""

    settings: SearchSettings
    source_file: str
    strategy: Strategy
    engine: Engine
    study: StudyThread
    files: StudyFiles
    stopping: Callable[[], bool]
    out_of_time: Callable[[], bool]
    """Whether running trials are to end with the epochs they have."""
    on_progress: Callable[[int, Blueprint, Progress], None]
    show: Callable[[str], None]
    at_once: int = 1
    """How many trials may be on the devices at the same time."""
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    facts: dict[int, TrialFacts] = field(default_factory=dict)
    candidates_seen: bool = False
    """Whether `build` is known to return candidates; until then it runs on a device, where an objective belongs."""
    objective_seen: bool = False
    """Whether `build` is an ordinary objective, which belongs on a device whatever the strategy."""
    builder_refused: str = ""
    """Why candidates of this study are built on devices after all."""

    def __post_init__(self) -> None:
        self.deadlines = Deadlines(self.settings.deadline)
        self.survival = Survival(pruner=self.settings.pruner not in (None, "none"))

    async def run(self, asked: Asked) -> Ended | None:
        """Run one trial to its end; None when it was interrupted. Never raises for what user code does."""
        owned = self.study.study
        facts = self.facts[asked.number] = TrialFacts()
        if asked.attempts == 0:
            # What lies there is of another study that had this number.
            Checkpoints(self.files.checkpoints(asked.number)).remove()
        history: list[Failed] = []
        failed: tuple[str, Outcome] | None = None
        for number in range(asked.attempts + 1, 10**6):
            # The end of a lost attempt and the beginning of the next are one transaction.
            info: TrialInfo = await self.study.call(owned.begin_attempt, asked, number, failed)
            before = facts.checkpoints, facts.trained
            try:
                outcome = await self._attempt(info)
            except Interrupted:
                self.study.post(owned.end_attempt, info.attempt, Outcome(Status.INTERRUPTED))
                return None
            finally:
                self.engine.drop(info.attempt)
            if owned.space_change:
                raise SpecError(owned.space_change, ALLOW)
            history.append(Failed(outcome.status, progressed=(facts.checkpoints, facts.trained) != before))
            if outcome.status in (Status.COMPLETE, Status.PRUNED) or not self.retries.again(history):
                break
            logger.info("trial %d: %s (%s), trying again", asked.number, outcome.status, outcome.error)
            failed = (info.attempt, outcome)
        return await self._tell(asked.number, info.attempt, outcome)

    async def _tell(self, number: int, attempt: str, outcome: Outcome) -> Ended:
        facts = self.facts.pop(number)
        surplus = await self.study.call(
            self.study.study.tell, number, attempt, outcome, seconds=facts.seconds, device=facts.device,
            peak_device_bytes=facts.peak_device_bytes, strategy=facts.strategy or self.strategy.name,
            shards=facts.shards, communicated_bytes=facts.communicated_bytes,
            spill_read_bytes=facts.read_bytes, spill_written_bytes=facts.written_bytes,
            plan=None if facts.plan is None else json.dumps(facts.plan),
        )  # fmt: skip
        return Ended(outcome, facts.trained, surplus)

    def tidy_left_overs(self, going_on: Container[int]) -> None:
        """Remove checkpoints of trials that ended just before their search was killed."""
        for number in self.files.checkpointed():
            if number not in going_on:
                Checkpoints(self.files.checkpoints(number)).remove()

    def tidy(self, number: int, ended: Ended) -> None:
        """Remove the files that an ended trial no longer needs; its end must be on disk by then."""
        Checkpoints(self.files.checkpoints(number)).remove()
        if ended.trained:
            for other in ended.surplus if ended.outcome.status is Status.COMPLETE else [number]:
                self.files.weights(other).unlink(missing_ok=True)

    async def _attempt(self, info: TrialInfo) -> Outcome:
        try:
            built, where = await self._build(info)
            if built.values is not None:
                return Outcome(Status.COMPLETE, built.values)
            assert built.blueprint is not None
            self.facts[info.number].trained = True
            self._check_metrics(built.blueprint)
            return await self._train(info, built.blueprint, Candidacy(where, built.parcel))
        except Pruned:
            return Outcome(Status.PRUNED, error=STOPPED if info.number in self.study.study.stopped else "")
        except CandidateError as error:
            return Outcome(Status.FAILED, error=str(error))
        except UnitFailed as error:
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
            return Outcome(Status.LOST, error=str(error))

    async def _build(self, info: TrialInfo) -> tuple[Built, int | None]:
        """Build in the builder where that is known to be good; else on a device."""
        if self.strategy.builds_apart and not self.objective_seen:
            result = await self._build_unit(info, build_and_hold, Role.BUILDER)
            self.objective_seen = result.value.values is not None
            return result.value, result.worker
        if self.candidates_seen and not self.builder_refused:
            result = await self._build_unit(info, build_for_device, Role.BUILDER)
            built: Built = result.value
            if not built.stays_because:
                return built, None
            self.builder_refused = built.stays_because
            logger.info("candidates are built on devices from now on, as they cannot be sent: %s", built.stays_because)
        result = await self._build_unit(info, build_here, Role.DEVICE)
        self.candidates_seen = result.value.blueprint is not None
        return result.value, result.worker

    async def _build_unit(self, info: TrialInfo, work: Callable[..., Built], role: Role) -> UnitResult:
        unit = Unit(
            trial=info.number, attempt=info.attempt, kind="build", work=work, args=(self.source_file, info), role=role,
            deadline=self.deadlines.of("build"),
        )  # fmt: skip
        result = await self.engine.run(unit)
        self.deadlines.measured("build", result.seconds)
        return result

    def _check_metrics(self, blueprint: Blueprint) -> None:
        for metric in self.settings.metrics:
            if metric not in blueprint.metrics:
                raise CandidateError(f"the candidate has no metric {metric!r}", nearest(metric, blueprint.metrics))

    async def _train(self, info: TrialInfo, blueprint: Blueprint, candidacy: Candidacy) -> Outcome:
        run = _Run(
            number=info.number, seed=info.seed, attempt=info.attempt, blueprint=blueprint, candidacy=candidacy,
            metric=self.settings.metrics[0], maximize=self.settings.directions[0] == "maximize",
            weights=self.files.weights(info.number), checkpoints=self.files.checkpoints(info.number),
            profiles=self.files.profiles,
            engine=self.engine, at_once=self.at_once, runner=self,
        )  # fmt: skip
        await (await self._strategy_for(run)).train(run)
        if blueprint.keep == "best":
            best = max if run.maximize else min
            return Outcome(Status.COMPLETE, best(run.judged, key=lambda values: values[0]))
        return Outcome(Status.COMPLETE, run.judged[-1])

    async def _strategy_for(self, run: _Run) -> Strategy:
        """The search's strategy; `whole` for a candidate that cannot be cut, where the choice is ours."""
        because = run.blueprint.whole_because
        if not because or not self.strategy.builds_apart:
            return self.strategy
        chosen = self.settings.strategy
        if (chosen if isinstance(chosen, str) else chosen.get("name")) != "auto":
            raise CandidateError(f"the candidate cannot be cut: {because}", "use strategy 'whole' or 'auto'")
        held = await run.unit("pack", pack_held, run.attempt, role=Role.BUILDER, worker=run.candidacy.worker)
        run.candidacy = Candidacy(None, held.value)
        return Whole()


@dataclass
class _Run(TrialRun):
    """A strategy's view of an attempt, joined to the study and the display."""

    runner: TrialRunner
    judged: list[tuple[float, ...]] = field(default_factory=list)
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
        return expected_remaining(per_epoch, epoch, self.blueprint.epochs, self.runner.survival)

    def planned(self, strategy: str, shards: int, plan: dict[str, Any] | None = None) -> None:
        facts = self.runner.facts[self.number]
        facts.strategy, facts.shards, facts.plan = strategy, shards, plan

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
        self.runner.survival.reported(epoch)
        if pruned:
            self.runner.survival.pruned(epoch)
            raise Pruned

    async def restored(self, history: list[dict[str, float]], notes: tuple[str, ...]) -> None:
        study = self.runner.study
        for note in notes:
            logger.info("trial %d: %s", self.number, note)
            study.post(study.study.event, self.number, "checkpoint", note)
        for epoch, metrics in enumerate(history):
            await self._record(epoch, metrics)

    async def _record(self, epoch: int, metrics: dict[str, float]) -> bool:
        self.judged.append(tuple(metrics[name] for name in self.runner.settings.metrics))
        study = self.runner.study
        return await study.call(study.study.epoch, self.number, epoch, metrics)

    def checkpoint_due(self) -> bool:
        pause = max(self.runner.settings.checkpoint_seconds, self._save_seconds / CHECKPOINT_SHARE)
        return self.runner.stopping() or time.monotonic() - self._saved > pause

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


def outcome_of(failure: Failure) -> Outcome:
    """What a failed unit means for its trial."""
    status = Status(failure.status) if failure.status else Status.FAILED
    if status is Status.PRUNED:
        return Outcome(status)
    if failure.ours:
        return Outcome(status, error=failure.message)
    return Outcome(status, error=f"{failure.kind}: {failure.message}", traceback=failure.traceback)
