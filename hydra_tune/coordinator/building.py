"""Builds a trial's candidate, in the builder or on a device.

The first build of a search runs on a device, because it may turn out to be an ordinary objective, which belongs there.
Once `build` is known to return candidates, the builder makes them, so that devices do not wait. Candidates that cannot
be sent to another process are built on devices.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from hydra_tune.coordinator.deadlines import Deadlines
from hydra_tune.coordinator.objective_admission import ObjectiveAdmission
from hydra_tune.core.errors import SpecError, WorkerLost
from hydra_tune.engine.engine import Engine
from hydra_tune.engine.unit import Memory, Role, Unit, UnitFailed, UnitHung, UnitResult
from hydra_tune.strategies.base import Candidacy, Strategy
from hydra_tune.training.builds import Built, build_and_hold, build_for_device, build_here, check_build, pack_held
from hydra_tune.training.remote_trial import TrialInfo

logger = logging.getLogger(__name__)

NO_TRIAL = -1
"""Number of the trial in a unit that belongs to none."""


@dataclass
class Building:
    """Builds the candidates of one search; the first builds show what `build` returns."""

    engine: Engine
    strategy: Strategy
    source_file: str
    deadlines: Deadlines
    on_candidates: Callable[[], None]
    """Called when `build` is known to return candidates."""
    candidates_seen: bool = False
    """True once `build` is known to return candidates."""
    objective_seen: bool = False
    """True once `build` is known to be an ordinary objective, which runs on a device under every strategy."""
    objectives: ObjectiveAdmission = field(init=False)
    """Memory that objectives take."""
    builder_refused: str = ""
    """Reason why candidates are built on devices after all."""

    def __post_init__(self) -> None:
        self.objectives = ObjectiveAdmission(self.engine.devices)

    async def build(self, info: TrialInfo) -> tuple[Built, Candidacy]:
        """Build the candidate of a trial, or run its objective; return the result and the candidate's location."""
        if self.strategy.builds_apart and not self.objective_seen:
            result = await self._unit(info, build_and_hold, Role.BUILDER)
            self.objective_seen = result.value.values is not None
            return result.value, self._waits(result.worker)
        if self.candidates_seen and not self.builder_refused:
            result = await self._unit(info, build_for_device, Role.BUILDER)
            built: Built = result.value
            if not built.stays_because:
                return built, self._waits(result.worker if self.strategy.plans else None, built.parcel)
            self._refuse_builder(built.stays_because)
        memory = None if self.candidates_seen else self.objectives.memory
        result = await self._unit(info, build_here, Role.DEVICE, memory)
        self._learn(result.value)
        if result.value.blueprint is not None and memory is not None:
            self._check_one_device()
            self.engine.let_go(info.attempt)  # its strategy says what it takes
        return result.value, self._waits(result.worker, result.value.parcel)

    async def bring(
        self, info: TrialInfo, where: Candidacy, *, apart: bool, anew: bool, memory: Memory | None
    ) -> Candidacy:
        """Return a candidate in the builder (`apart`) or ready for a device, built again if necessary."""
        if not anew and where.held == apart:
            return where
        if not anew and where.parcel is not None:
            return Candidacy(None, where.parcel)  # packed before a later build could change its data
        if not anew and where.held:
            try:
                packed = await self.engine.run(self._packing(info, where))
                self.deadlines.measured("pack", packed.seconds)
                return Candidacy(None, packed.value)
            except UnitFailed as error:
                self._refuse_builder(error.failure.message)
        self.engine.drop(info.attempt)
        if apart:
            result = await self._unit(info, build_and_hold, Role.BUILDER)
        else:
            result = await self._unit(info, build_here, Role.DEVICE, memory)
        return Candidacy(result.worker, held=apart)

    def measured(self, peak: int) -> None:
        """Note the memory that an objective was measured to take."""
        if self.objectives.measured(peak):
            self.engine.remeasure(self.objectives.memory)

    def _check_one_device(self) -> None:
        if any(device.count > 1 for device in self.engine.devices):
            raise SpecError(
                "devices_per_trial is for objectives, and build returned a Candidate",
                "leave it out; strategies pipeline, sparse and ist train one candidate on several devices",
            )

    def _packing(self, info: TrialInfo, where: Candidacy) -> Unit:
        return Unit(
            trial=info.number, attempt=info.attempt, kind="pack", work=pack_held, args=(info.attempt,),
            role=Role.BUILDER, worker=where.worker, deadline=self.deadlines.of("pack"),
        )  # fmt: skip

    async def _unit(
        self, info: TrialInfo, work: Callable[..., Built], role: Role, memory: Memory | None = None
    ) -> UnitResult:
        unit = Unit(
            trial=info.number, attempt=info.attempt, kind="build", work=work, args=(self.source_file, info), role=role,
            deadline=self.deadlines.of("build"), memory=memory,
        )  # fmt: skip
        result = await self.engine.run(unit)
        self.deadlines.measured("build", result.seconds)
        if result.value.peak_bytes is not None:
            self.measured(result.value.peak_bytes)
        return result

    def _waits(self, worker: int | None, parcel: bytes | None = None) -> Candidacy:
        return Candidacy(worker, parcel, held=worker is not None and self.engine.is_builder(worker))

    def _learn(self, built: Built) -> None:
        """Record from the first build what `build` returns."""
        self.candidates_seen, self.objective_seen = built.blueprint is not None, built.values is not None
        if self.candidates_seen:
            self.on_candidates()

    def _refuse_builder(self, because: str) -> None:
        self.builder_refused = because
        logger.info("candidates are built on devices from now on, as they cannot be sent: %s", because)


async def check_build_loads(
    engine: Engine, source_file: str, role: Role, stop: asyncio.Event, deadline: float | None
) -> None:  # fmt: skip
    """Import the build function in the worker that will call it first; raise a SpecError for a mistake in it.

    Returns early if stopped. A worker that is lost meanwhile may have been killed for a reason of its own: the next one
    tries again.
    """
    unit = Unit(
        trial=NO_TRIAL, attempt="import", kind="import", work=check_build, args=(source_file,), role=role,
        deadline=deadline, recorded=False,
    )  # fmt: skip
    checking = asyncio.ensure_future(_run_again_if_lost(engine, unit))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({checking, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if checking.done():
            checking.result()
    except UnitFailed as error:
        raise SpecError(error.failure.message) from error
    except (UnitHung, WorkerLost) as error:
        raise SpecError(
            f"the build function cannot be imported: {error}", "mend what its file does on import"
        ) from error
    finally:
        checking.cancel()
        stopping.cancel()
        await asyncio.gather(checking, stopping, return_exceptions=True)


async def _run_again_if_lost(engine: Engine, unit: Unit) -> UnitResult:
    try:
        return await engine.run(unit)
    except WorkerLost as error:
        logger.info("the build function is imported again: %s", error)
        return await engine.run(unit)
