"""One run of a search: starts the engine, the study's thread and the loop of trials, and stops them.

Its trials run in a `TrialLoop`, within `Limits`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra_tune.coordinator.actions import Obeying
from hydra_tune.coordinator.attempts import TrialRunner
from hydra_tune.coordinator.building import NO_TRIAL, check_build_loads
from hydra_tune.coordinator.display import Display
from hydra_tune.coordinator.failures import Failures
from hydra_tune.coordinator.interrupts import Signals
from hydra_tune.coordinator.limits import Limits
from hydra_tune.coordinator.makespan import Makespan
from hydra_tune.coordinator.outage import Outage
from hydra_tune.coordinator.run_directories import RunDirectories
from hydra_tune.coordinator.settings import SearchSettings
from hydra_tune.coordinator.spill_watch import LOOK_SECONDS, SpillWatch
from hydra_tune.coordinator.study import OwnedStudy
from hydra_tune.coordinator.study_thread import StudyThread
from hydra_tune.coordinator.trial_loop import TrialLoop
from hydra_tune.core.devices import Device, cores
from hydra_tune.core.errors import InputError, StorageError
from hydra_tune.core.states import Outcome
from hydra_tune.engine.engine import Engine
from hydra_tune.engine.scheduler import POLICIES, SLOTS
from hydra_tune.engine.unit import Role, Unit, UnitResult
from hydra_tune.planner.admission import Admission, Room
from hydra_tune.planner.auto import Auto
from hydra_tune.planner.planner import Planner
from hydra_tune.planner.question import Survey
from hydra_tune.planner.rates import known_rates
from hydra_tune.planner.resolve import resolve
from hydra_tune.storage.details import POOL
from hydra_tune.strategies.base import Strategy
from hydra_tune.strategies.pool import Pool
from hydra_tune.training.builds import SOURCE_FILE, write_source
from hydra_tune.training.side_effects import LOST_CHANGE
from hydra_tune.training.source import Source


@dataclass
class Search:
    """One run of a search: the coordinator's side."""

    source: Source
    settings: SearchSettings
    devices: tuple[Device, ...]
    display: Display
    directories: RunDirectories
    """Directories for data exchanged by processes (the first) and for spilled state when that is full."""
    space: Any = None
    again: str = ""
    """Command that resumes this search."""
    strategy: Strategy | None = None
    """Strategy to use; by default that of the settings."""
    profiles: Path | None = None
    """Directory of the measured costs of models; by default with the study's files."""
    surveys: dict[int, Survey] = field(default_factory=dict)
    """Surveys of candidates, by trial."""
    interrupted: bool = False
    failures: Failures = field(init=False)
    """Trials of this run that failed."""
    _said_lost_change: bool = False
    _task: asyncio.Task[None] | None = None
    """The task that runs the search."""

    def __post_init__(self) -> None:
        self.failures = Failures(self.display.show)

    async def run(self) -> None:
        self._stop = asyncio.Event()
        self._strategy = self.strategy or resolve(
            self.settings.strategy, budgeted=self.settings.device_memory is not None
        )
        self._limits = Limits(self.settings, self._strategy, len(self.devices), self.failures)
        self.makespan = Makespan(len(self.devices))
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self.interrupted:
            self._interrupt()
        self._at_once = min(self.settings.trials, self._limits.at_once)
        cpus = [device.memory for device in self.devices if device.torch_device == "cpu"]
        self._admission = Admission(Room.here(self.directories.paths, sum(cpus)), self.display.show)
        if isinstance(self._strategy, Auto):
            self._strategy = dataclasses.replace(self._strategy, planner=self._planner())
        engine = self._engine()
        self.study = StudyThread(
            lambda: OwnedStudy(self.settings, self.space, self.source),
            Outage(self.settings.database_patience, self.display.show),
            on_broken=self._give_up,
        )
        with Signals(self._interrupt, self.display.restore_terminal):
            try:
                # The template imports torch while the database is opened.
                async with engine:
                    source_file = write_source(self.source, self.directories.paths[0])
                    first = Role.BUILDER if self._strategy.builds_apart else Role.DEVICE
                    await check_build_loads(engine, source_file, first, self._stop)
                    await self._run_study(engine, source_file)
            except StorageError as error:
                if not self.again or not self.study.opened:
                    raise
                raise StorageError(error.message, f"{error.hint}; then go on with: {self.again}") from error

    async def _run_study(self, engine: Engine, source_file: str) -> None:
        async with self.study:
            self._limits.total = self.study.total
            self.display.set_settings(dataclasses.replace(self.settings, trials=self.study.total))
            self.runner = self._trial_runner(engine, source_file)
            await self._run_trials()
            await self._trials.announced()
            line = self.makespan.line()
            if line and not self.runner.building.objective_seen:
                self.display.show(line)
            if self._trials.broken is not None:
                raise self._trials.broken

    def _engine(self) -> Engine:
        folder = self.source.folder()
        policy = POLICIES[self._strategy.policy]
        return Engine(
            self.devices,
            observer=self,
            directory=self.directories.paths[0],
            overflow=self.directories.paths[1:],
            python_path=[folder] if folder else [],
            expect=self._at_once,
            policy=policy,
            slots=1 if self._strategy.gangs or self._strategy.spans_devices else policy.slots,
            slots_alone=1 if self._strategy.gangs else SLOTS,
            warm=_imported_ahead(self._strategy) if self.source.uses_torch() else {},
        )

    def _trial_runner(self, engine: Engine, source_file: str) -> TrialRunner:
        return TrialRunner(
            settings=self.settings,
            source_file=source_file,
            strategy=self._strategy,
            engine=engine,
            study=self.study,
            at_once=self._at_once,
            admission=self._admission,
            profiles=self.profiles or self.study.files.profiles,
            stopping=self._stop.is_set,
            out_of_time=self._limits.ends_trials,
            on_candidates=self._expect_candidates,
            on_progress=self.display.trial_progress,
            on_room=self._room_for_more,
            show=self.display.show,
            directory_losses=self._directory_losses,
        )

    def _directory_losses(self) -> int:
        """Make removed directories of this run again; return how many times that was necessary."""
        if self.directories.restore(SOURCE_FILE):
            write_source(self.source, self.directories.paths[0])
            lost = "a directory of this search was removed and is made again"
            if not self.runner.building.objective_seen:
                # Workers refer to files that are gone, such as a data set that is sent once.
                lost += "; running trials start again from their checkpoints"
                self.runner.engine.restart_workers("the directory of its search was removed")
            self.display.show(lost)
            self.study.record_event(None, "directory", lost)
        return self.directories.losses

    async def _keep_directories(self) -> None:
        """Look after this run's directories; if they cannot be made again, end the search."""
        try:
            while True:
                await asyncio.sleep(LOOK_SECONDS)
                self._directory_losses()
        except (InputError, OSError) as error:
            self._trials.give_up(error)

    def _planner(self) -> Planner:
        room = self._admission.room
        pool = Pool.of(self.devices, host_bytes=room.host, disk_bytes=room.disk, cores=cores())
        known = known_rates()
        crowding = known.crowding if known is not None and pool.cpu and pool.devices > 1 else 1.0
        return Planner(pool, self._rivals, self._admission, left=self._left, crowding=crowding, surveys=self.surveys)

    def _expect_candidates(self) -> None:
        """Allow one more trial in flight, as trials are now built apart from their devices."""
        if not self._limits.candidates_seen:
            self._limits.candidates_seen = True
            self._trials.limits_raised()
            self.runner.engine.warm_up(_imported_ahead(self._strategy))

    def _room_for_more(self) -> None:
        """Check whether another trial may begin, as the strategy's limit may have changed."""
        if hasattr(self, "_trials"):
            self._trials.limits_raised()

    def _left(self) -> int:
        return self._limits.left(self._trials.finished)

    def _rivals(self) -> int:
        return self._limits.rivals(self._trials.finished, self._trials.running)

    async def _run_trials(self) -> None:
        """Run the loop of trials, and beside it the tasks that look for actions and at the spill store."""
        waiting = await self.study.interrupted()
        finished = await self.study.finished()
        self._limits.points = self.study.trial_limit
        self._trials = TrialLoop(
            self.runner, self._limits, self.display, self._stop, self._note, finished=finished,
            catch=self.settings.catch,
        )  # fmt: skip
        self.runner.tidy_left_overs({asked.number for asked in waiting})
        self._show_beginning(finished)
        actions = Obeying(self, self.study)
        spill = SpillWatch(self.directories.paths, self.study.record_spilled, self._saw_spilled)
        self.runner.look_at_spill = spill.look
        beside = (
            asyncio.create_task(actions.until_cancelled(), name="actions"),
            asyncio.create_task(spill.until_cancelled(), name="spill store"),
            asyncio.create_task(self._keep_directories(), name="directories"),
        )
        try:
            await self._trials.run(waiting, actions.look)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*self._trials.cancel(), *beside, return_exceptions=True)
            spill.ended()

    def _show_beginning(self, finished: int) -> None:
        """Show and record that the search has begun."""
        self.display.search_started(self.study.study_id, finished)
        if self.again:
            self.display.show(f"if it is interrupted: {self.again}")
        self.study.record_event(None, POOL, json.dumps({device.name: device.memory for device in self.devices}))
        if finished >= self._limits.total:
            self.display.show(
                f"nothing is left to do: the study has {finished} trials, and trials={self._limits.total} is the total "
                f"(for 10 more give trials={finished + 10}, or n_trials=10)"
            )
        if self._limits.trials < self._limits.total:
            self.display.show(f"the grid has {self._limits.trials} points: the search ends there")

    def _give_up(self, error: Exception) -> None:
        """End the search, as nothing can be stored any more."""
        if hasattr(self, "_trials"):
            self._trials.give_up(error)

    def _note(self, outcome: Outcome) -> None:
        """Note the end of a trial."""
        self.failures.note(outcome)
        if self.display.settings.metrics != self.study.metrics:
            self.display.set_settings(dataclasses.replace(self.display.settings, metric=self.study.metrics))

    # Called by actions

    def stop_on_request(self) -> None:
        self.interrupted = True
        self._stop.set()
        self.display.show("stopping on request: running trials are checkpointed first")

    def total(self) -> int:
        return self._limits.total

    def room_for(self, trials: int) -> str:
        return self._limits.refusal(trials)

    def set_total(self, trials: int) -> None:
        self._limits.total = trials
        self.display.set_settings(dataclasses.replace(self.display.settings, trials=trials))
        self._trials.limits_raised()

    # Called to interrupt

    def interrupt_from_outside(self) -> None:
        """Stop as for Ctrl-C, the second time at once; call from a thread other than the search's."""
        again, self.interrupted = self.interrupted, True
        if self._task is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._task.cancel if again else self._interrupt)

    def _interrupt(self) -> None:
        self.interrupted = True
        self._stop.set()
        self.display.show("stopping: running trials are checkpointed first; Ctrl-C again stops at once")

    # Called by the engine (Observer)

    def unit_started(self, unit: Unit, device: str) -> None:
        if unit.trial == NO_TRIAL:
            return
        self.display.unit_started(unit, device)

    def unit_ended(self, unit: Unit, result: UnitResult) -> None:
        if unit.trial == NO_TRIAL:
            return
        members = unit.members or (unit.trial,)
        for number in members:
            if (facts := self.runner.facts.get(number)) is not None:
                facts.add(unit, result, sharers=len(members))
        if unit.trial in self.runner.facts:
            if unit.role is Role.DEVICE:
                self.makespan.add(unit.trial, result.started, result.seconds)
            if unit.recorded:
                self.study.record_unit(unit, result)
        self.display.unit_ended(unit, result)

    def _saw_spilled(self, number: int, size: int) -> None:
        facts = self.runner.facts.get(number)
        if facts is not None:
            facts.saw_spilled(size)

    def worker_line(self, device: str, line: str) -> None:
        self.display.show(f"[{device}] {line}")

    def worker_lost(self, device: str, reason: str) -> None:
        self.display.show(reason)

    def late_result(self, unit: Unit, device: str) -> None:
        self.study.record_late_result(unit, device)

    def call(self, unit: Unit, name: str, args: tuple[Any, ...], reply: Callable[[Any, Any], None] | None) -> None:
        if name == "stopping" and reply is not None:
            reply(self._stop.is_set(), None)
            return
        if name == "note" and args[0] == LOST_CHANGE and not self._said_lost_change:
            self._said_lost_change = True
            self.display.show(f"note: {args[1]}")
        if name == "checkpointed" and unit.trial in self.runner.facts:
            self.runner.facts[unit.trial].checkpoints += 1
        self.study.answer(unit, name, args, reply)


def _imported_ahead(strategy: Strategy) -> dict[Role, Sequence[str]]:
    """Return the modules that workers need for candidates, imported while the database is opened."""
    # The first optimizer of a process imports torch._dynamo, which takes half as long as torch itself.
    every = ("torch", "torch._dynamo", "hydra_tune.training.prepared", "hydra_tune.strategies.whole.units")
    surveys = ("hydra_tune.planner.survey",) if strategy.plans else ()
    return {Role.DEVICE: every, Role.BUILDER: (*every, *surveys)}
