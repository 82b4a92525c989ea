"""From an asked trial to its outcome: build, train by a strategy, judge, and try again where that makes sense."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra_tune.actions import STOPPED
from hydra_tune.attempt_run import AttemptRun
from hydra_tune.builds import Blueprint, Built, build_and_hold, build_for_device, build_here, pack_held
from hydra_tune.checkpoint import Checkpoints
from hydra_tune.deadlines import Deadlines
from hydra_tune.engine.engine import Engine
from hydra_tune.engine.remaining import Survival
from hydra_tune.engine.spill import SpillFull
from hydra_tune.engine.unit import Failure, Memory, Role, TrialEnded, Unit, UnitFailed, UnitHung, UnitResult
from hydra_tune.errors import CandidateError, SpecError, WorkerLost, nearest
from hydra_tune.files import StudyFiles
from hydra_tune.planning.admission import Admission
from hydra_tune.planning.planner import Planner
from hydra_tune.planning.survey import Survey
from hydra_tune.remote_trial import TrialInfo
from hydra_tune.resuming import ALLOW
from hydra_tune.retries import Failed, RetryPolicy
from hydra_tune.settings import SearchSettings
from hydra_tune.states import Outcome, Status
from hydra_tune.strategies.base import Candidacy, Interrupted, Pruned, Strategy
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
    choice: dict[str, Any] | None = None
    """Why this strategy, what it was expected to take and what the others were, as plain data."""
    earlier: list[dict[str, Any]] = field(default_factory=list)
    """The choices before it, of a trial that changed its strategy."""
    read_bytes: int = 0
    """From the spill store."""
    written_bytes: int = 0
    spilled_bytes: int | None = None
    """The most that was seen in the spill store at a time."""
    communicated_bytes: int = 0

    def stored_plan(self) -> str | None:
        """The plan with the choice that it follows from, as text."""
        if self.choice is None:
            return None if self.plan is None else json.dumps(self.plan)
        measured: dict[str, Any] = {"measured_device_bytes": self.peak_device_bytes}
        if self.earlier:
            measured["earlier"] = self.earlier
        return json.dumps({**(self.plan or {}), "choice": {**self.choice, **measured}})

    def lies(self, size: int) -> None:
        """So many bytes of it lie in the spill store now."""
        self.spilled_bytes = max(self.spilled_bytes or 0, size)

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
    on_candidates: Callable[[], None]
    """Called when `build` is known to return candidates."""
    on_progress: Callable[[int, Blueprint, Progress], None]
    show: Callable[[str], None]
    profiles: Path
    """Where the measured costs of models are kept."""
    admission: Admission
    planner: Planner | None = None
    """Of a search that chooses a strategy for each trial."""
    at_once: int = 1
    """How many trials may be on the devices at the same time."""
    surveys: dict[int, Survey] | None = None
    """What looks at candidates have shown, by trial; kept where somebody wants to know."""
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
        self.survival = Survival(
            pruner=self.settings.pruner not in (None, "none"), maximize=self.settings.directions[0] == "maximize"
        )

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
                self.admission.release(asked.number)
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
            spilled_bytes=facts.spilled_bytes, plan=facts.stored_plan(),
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
            return await self._train(info, built.blueprint, Candidacy(where, built.parcel, self._held(where)))
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
                return built, result.worker if self.strategy.plans else None
            self._refuse_builder(built.stays_because)
        result = await self._build_unit(info, build_here, Role.DEVICE)
        self._learn(result.value)
        return result.value, result.worker

    def _learn(self, built: Built) -> None:
        """From the first build on it is known what `build` returns."""
        self.candidates_seen, self.objective_seen = built.blueprint is not None, built.values is not None
        if self.candidates_seen:
            self.on_candidates()

    async def _build_unit(
        self, info: TrialInfo, work: Callable[..., Built], role: Role, memory: Memory | None = None
    ) -> UnitResult:
        unit = Unit(
            trial=info.number, attempt=info.attempt, kind="build", work=work, args=(self.source_file, info), role=role,
            deadline=self.deadlines.of("build"), memory=memory,
        )  # fmt: skip
        result = await self.engine.run(unit)
        self.deadlines.measured("build", result.seconds)
        return result

    def _check_metrics(self, blueprint: Blueprint) -> None:
        for metric in self.settings.metrics:
            if metric not in blueprint.metrics:
                raise CandidateError(f"the candidate has no metric {metric!r}", nearest(metric, blueprint.metrics))

    async def _train(self, info: TrialInfo, blueprint: Blueprint, candidacy: Candidacy) -> Outcome:
        run = AttemptRun(
            number=info.number, seed=info.seed, attempt=info.attempt, blueprint=blueprint, candidacy=candidacy,
            metric=self.settings.metrics[0], maximize=self.settings.directions[0] == "maximize",
            weights=self.files.weights(info.number), checkpoints=self.files.checkpoints(info.number),
            profiles=self.profiles,
            engine=self.engine, at_once=self.at_once, planner=self.planner, runner=self, info=info,
        )  # fmt: skip
        if blueprint.whole_because and self.strategy.cuts() and not self.strategy.plans:
            raise CandidateError(
                f"the candidate cannot be cut: {blueprint.whole_because}", "use strategy 'whole' or 'auto'"
            )
        await self.strategy.train(run)
        if blueprint.keep == "best":
            best = max if run.maximize else min
            return Outcome(Status.COMPLETE, best(run.judged, key=lambda values: values[0]))
        return Outcome(Status.COMPLETE, run.judged[-1])

    def _held(self, worker: int | None) -> bool:
        return worker is not None and worker == self.engine.builder

    async def bring(self, run: AttemptRun, *, apart: bool, anew: bool) -> Candidacy:
        """Have a candidate in the builder, or where a device can take it; built again where it is elsewhere."""
        where = run.candidacy
        if not anew and where.held == apart:
            return where
        if not anew and where.parcel is not None:
            return Candidacy(None, where.parcel)  # packed before a later build could change what it was built of
        if not anew and where.held:
            try:
                packed = await run.unit("pack", pack_held, run.attempt, role=Role.BUILDER, worker=where.worker)
                return Candidacy(None, packed.value)
            except UnitFailed as error:
                self._refuse_builder(error.failure.message)
        self.engine.drop(run.attempt)
        if apart:
            result = await self._build_unit(run.info, build_and_hold, Role.BUILDER)
        else:
            result = await self._build_unit(run.info, build_here, Role.DEVICE, run.memory)
        return Candidacy(result.worker, held=apart)

    def _refuse_builder(self, because: str) -> None:
        self.builder_refused = because
        logger.info("candidates are built on devices from now on, as they cannot be sent: %s", because)


def outcome_of(failure: Failure) -> Outcome:
    """What a failed unit means for its trial."""
    status = Status(failure.status) if failure.status else Status.FAILED
    if status is Status.PRUNED:
        return Outcome(status)
    if failure.ours:
        return Outcome(status, error=failure.message)
    return Outcome(status, error=f"{failure.kind}: {failure.message}", traceback=failure.traceback)
