"""The devices of one machine at work for a search: engine, admission of trials, planner, spill store.

A search on this machine has one; a search on a cluster has one on each node.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hydra_tune.coordinator.building import check_build_loads
from hydra_tune.coordinator.run_directories import RunDirectories
from hydra_tune.coordinator.settings import SearchSettings
from hydra_tune.coordinator.spill_watch import LOOK_SECONDS, SpillWatch
from hydra_tune.coordinator.trial_study import TrialStudy
from hydra_tune.core.devices import Device
from hydra_tune.engine.engine import Engine
from hydra_tune.engine.jobs import Observer
from hydra_tune.engine.scheduler import POLICIES, SLOTS
from hydra_tune.engine.unit import Role
from hydra_tune.engine.worker_processes import LocalProcesses, Processes
from hydra_tune.planner.admission import Admission, Room
from hydra_tune.planner.auto import Auto
from hydra_tune.planner.planner import Planner
from hydra_tune.planner.question import Survey
from hydra_tune.planner.rates import known_rates
from hydra_tune.strategies.base import Strategy
from hydra_tune.strategies.pool import Pool
from hydra_tune.training.builds import SOURCE_FILE, write_source
from hydra_tune.training.source import Source


@dataclass
class NodeRun:
    """One machine's part in a search; use as `async with NodeRun(...) as node`."""

    source: Source
    settings: SearchSettings
    devices: tuple[Device, ...]
    directories: RunDirectories
    strategy: Strategy
    observer: Observer
    at_once: int
    """Trials that are likely to run at once."""
    rivals: Callable[[], int]
    """Returns the number of trials that want this machine's devices."""
    show: Callable[[str], None]
    cores: int
    """Cores of this machine that the search may use."""
    left: Callable[[], int] = lambda: 0
    """Returns the number of trials that have not ended; 0 on a node of a cluster, where trials are not packed."""
    python_path: Sequence[str] = ()
    """Folders of the user's modules, beside the source's own."""
    surveys: dict[int, Survey] = field(default_factory=dict)
    """Surveys of candidates, by trial."""
    processes: Callable[[Sequence[str]], Processes] = LocalProcesses
    """Makes the source of worker processes."""

    def __post_init__(self) -> None:
        cpus = [device.memory for device in self.devices if device.torch_device == "cpu"]
        self.admission = Admission(Room.here(self.directories.paths, sum(cpus)), self.show)
        if isinstance(self.strategy, Auto):
            self.strategy = dataclasses.replace(self.strategy, planner=self._planner())
        self.engine = self._engine()

    async def __aenter__(self) -> NodeRun:
        await self.engine.__aenter__()
        self.source_file = write_source(self.source, self.directories.paths[0])
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.engine.__aexit__()

    async def check_build_loads(self, stop: asyncio.Event) -> None:
        """Import the build function in the worker that will call it first; raise a SpecError for a mistake in it."""
        first = Role.BUILDER if self.strategy.builds_apart else Role.DEVICE
        await check_build_loads(self.engine, self.source_file, first, stop, self.settings.deadline)

    def candidates_seen(self) -> None:
        """Let workers import what candidates need, as `build` is known to return them."""
        self.engine.warm_up(_imported_ahead(self.strategy))

    def directory_losses(self, study: TrialStudy, *, candidates: bool) -> int:
        """Make removed directories of this run again; return how many times that was necessary."""
        if self.directories.restore(SOURCE_FILE):
            write_source(self.source, self.directories.paths[0])
            lost = "a directory of this search was removed and is made again"
            if candidates:
                # Workers refer to files that are gone, such as a data set that is sent once.
                lost += "; running trials start again from their checkpoints"
                self.engine.restart_workers("the directory of its search was removed")
            self.show(lost)
            study.record_event(None, "directory", lost)
        return self.directories.losses

    async def keep_directories(self, losses: Callable[[], int]) -> None:
        """Look after this run's directories until cancelled; raises if they cannot be made again."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            losses()

    def spill_watch(self, study: TrialStudy, of_trial: Callable[[int, int], None]) -> SpillWatch:
        """Return the watch of this run's directories."""
        return SpillWatch(self.directories.paths, study.record_spilled, of_trial)

    def _engine(self) -> Engine:
        folder = self.source.folder()
        policy = POLICIES[self.strategy.policy]
        return Engine(
            self.devices,
            observer=self.observer,
            directory=self.directories.paths[0],
            overflow=self.directories.paths[1:],
            python_path=[*([folder] if folder else []), *self.python_path],
            expect=self.at_once,
            policy=policy,
            slots=1 if self.strategy.gangs or self.strategy.spans_devices else policy.slots,
            slots_alone=1 if self.strategy.gangs else SLOTS,
            warm=_imported_ahead(self.strategy) if self.source.uses_torch() else {},
            processes=self.processes,
            builders=self._builders,
        )

    @property
    def _builders(self) -> int:
        """Most builders: two where trials take turns and each is cut before it trains, so that devices start sooner."""
        cuts = self.strategy.builds_apart and not (self.strategy.spans_devices or self.strategy.gangs)
        return min(2, len(self.devices)) if cuts else 1

    def _planner(self) -> Planner:
        room = self.admission.room
        pool = Pool.of(self.devices, host_bytes=room.host, disk_bytes=room.disk, cores=self.cores)
        known = known_rates()
        crowding = known.crowding if known is not None and pool.cpu and pool.devices > 1 else 1.0
        return Planner(pool, self.rivals, self.admission, left=self.left, crowding=crowding, surveys=self.surveys)


def _imported_ahead(strategy: Strategy) -> dict[Role, Sequence[str]]:
    """Return the modules that workers need for candidates, imported while the database is opened."""
    # The first optimizer of a process imports torch._dynamo, which takes half as long as torch itself.
    every = ("torch", "torch._dynamo", "hydra_tune.training.prepared", "hydra_tune.strategies.whole.units")
    surveys = ("hydra_tune.planner.survey",) if strategy.plans else ()
    return {Role.DEVICE: every, Role.BUILDER: (*every, *surveys)}
