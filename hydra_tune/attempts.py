"""From an asked trial to its outcome: build, train by a strategy, judge, and try again where that makes sense."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hydra_tune.builds import Blueprint, Built, build_for_device, build_here
from hydra_tune.engine.engine import Engine
from hydra_tune.engine.unit import Failure, Role, Unit, UnitFailed, UnitResult
from hydra_tune.errors import CandidateError, WorkerLost, nearest
from hydra_tune.remote_trial import TrialInfo
from hydra_tune.settings import SearchSettings
from hydra_tune.source import Source
from hydra_tune.states import Outcome, Status
from hydra_tune.strategies.base import Candidacy, Pruned, Strategy, TrialRun
from hydra_tune.study import Asked
from hydra_tune.study_thread import StudyThread
from hydra_tune.training import Progress

logger = logging.getLogger(__name__)

ATTEMPTS = 2
"""How often a trial whose worker was lost is tried in all."""


@dataclass
class TrialFacts:
    """What is measured of a trial over all its units."""

    seconds: float = 0.0
    peak_device_bytes: int | None = None
    device: str = ""

    def add(self, unit: Unit, result: UnitResult) -> None:
        if unit.role is Role.DEVICE:
            self.seconds += result.seconds
            self.device = result.device
        if result.peak_bytes is not None:
            self.peak_device_bytes = max(self.peak_device_bytes or 0, result.peak_bytes)


@dataclass
class TrialRunner:
    """Runs trials of one search; what it learns from the first ones serves the later ones."""

    settings: SearchSettings
    source: Source
    strategy: Strategy
    engine: Engine
    study: StudyThread
    weights: Callable[[int], Path]
    on_progress: Callable[[int, Blueprint, Progress], None]
    facts: dict[int, TrialFacts] = field(default_factory=dict)
    candidates_seen: bool = False
    """Whether `build` is known to return candidates; until then it runs on a device, where an objective belongs."""
    builder_refused: str = ""
    """Why candidates of this study are built on devices after all."""

    async def run(self, asked: Asked) -> Outcome:
        """Run one trial to its end; never raises for what user code does."""
        self.facts[asked.number] = TrialFacts()
        for number in range(1, ATTEMPTS + 1):
            info = await self.study.call(self.study.study.begin_attempt, asked, number)
            try:
                outcome = await self._attempt(info)
            finally:
                self.engine.drop(info.attempt)
            self.study.post(self.study.study.end_attempt, info.attempt, outcome)
            if outcome.status is not Status.LOST:
                break
        await self._finish(asked.number, outcome)
        return outcome

    async def _finish(self, number: int, outcome: Outcome) -> None:
        facts = self.facts.pop(number)
        surplus = await self.study.call(
            self.study.study.tell, number, outcome, seconds=facts.seconds, device=facts.device,
            peak_device_bytes=facts.peak_device_bytes, strategy=self.strategy.name, shards=1, communicated_bytes=0,
        )  # fmt: skip
        if self.candidates_seen:
            for other in surplus if outcome.status is Status.COMPLETE else [number]:
                self.weights(other).unlink(missing_ok=True)

    async def _attempt(self, info: TrialInfo) -> Outcome:
        try:
            built, where = await self._build(info)
            if built.values is not None:
                return Outcome(Status.COMPLETE, built.values)
            assert built.blueprint is not None
            self._check_metrics(built.blueprint)
            return await self._train(info, built.blueprint, Candidacy(where, built.parcel))
        except Pruned:
            return Outcome(Status.PRUNED)
        except CandidateError as error:
            return Outcome(Status.FAILED, error=str(error))
        except UnitFailed as error:
            return outcome_of(error.failure)
        except WorkerLost as error:
            logger.warning("trial %d: %s", info.number, error)
            return Outcome(Status.LOST, error=str(error))

    async def _build(self, info: TrialInfo) -> tuple[Built, int | None]:
        """Build in the builder once candidates are expected and can travel; else on a device."""
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
            trial=info.number,
            attempt=info.attempt,
            kind="build",
            work=work,
            args=(self.source, info),
            role=role,
        )
        return await self.engine.run(unit)

    def _check_metrics(self, blueprint: Blueprint) -> None:
        for metric in self.settings.metrics:
            if metric not in blueprint.metrics:
                raise CandidateError(f"the candidate has no metric {metric!r}", nearest(metric, blueprint.metrics))

    async def _train(self, info: TrialInfo, blueprint: Blueprint, candidacy: Candidacy) -> Outcome:
        judged: list[tuple[float, ...]] = []

        async def report(epoch: int, metrics: dict[str, float]) -> None:
            judged.append(tuple(metrics[name] for name in self.settings.metrics))
            if await self.study.call(self.study.study.epoch, info.number, epoch, metrics):
                raise Pruned

        maximize = self.settings.directions[0] == "maximize"
        run = TrialRun(
            number=info.number, seed=info.seed, attempt=info.attempt, blueprint=blueprint, candidacy=candidacy,
            metric=self.settings.metrics[0], maximize=maximize, weights=self.weights(info.number),
            engine=self.engine, report=report,
            progress=lambda progress: self.on_progress(info.number, blueprint, progress),
        )  # fmt: skip
        await self.strategy.train(run)
        if blueprint.keep == "best":
            best = max if maximize else min
            return Outcome(Status.COMPLETE, best(judged, key=lambda values: values[0]))
        return Outcome(Status.COMPLETE, judged[-1])


_FAILURE_STATUS = {
    "TrialPruned": Status.PRUNED,
    "Diverged": Status.DIVERGED,
    "OutOfMemory": Status.OUT_OF_MEMORY,
    "OutOfMemoryError": Status.OUT_OF_MEMORY,
}
_PLAIN = ("CandidateError", "SpecError", "InputError", "Diverged", "OutOfMemory")
"""Errors of ours: their message says all, without the class's name before it and without a traceback."""


def outcome_of(failure: Failure) -> Outcome:
    """What a failed unit means for its trial."""
    status = _FAILURE_STATUS.get(failure.kind, Status.FAILED)
    if status is Status.PRUNED:
        return Outcome(status)
    if failure.kind in _PLAIN:
        return Outcome(status, error=failure.message)
    return Outcome(status, error=f"{failure.kind}: {failure.message}", traceback=failure.traceback)
