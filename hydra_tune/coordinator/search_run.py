"""One run of a search: starts the engine, the study's thread and the loop of trials, and stops them.

Its trials run in a `TrialLoop`, within `Limits`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra_tune.coordinator.actions import Obeying
from hydra_tune.coordinator.attempt_runner import AttemptRunner
from hydra_tune.coordinator.attempts import RunsAttempts, TrialRunner
from hydra_tune.coordinator.building import NO_TRIAL
from hydra_tune.coordinator.display import Display
from hydra_tune.coordinator.failures import Failures
from hydra_tune.coordinator.interrupts import Signals
from hydra_tune.coordinator.limits import Limits
from hydra_tune.coordinator.makespan import Makespan
from hydra_tune.coordinator.node_run import NodeRun
from hydra_tune.coordinator.outage import Outage
from hydra_tune.coordinator.run_directories import RunDirectories
from hydra_tune.coordinator.settings import SearchSettings
from hydra_tune.coordinator.study import OwnedStudy
from hydra_tune.coordinator.study_thread import StudyThread
from hydra_tune.coordinator.trial_loop import TrialLoop
from hydra_tune.core.devices import Device, cores
from hydra_tune.core.errors import InputError, MachineError, StorageError
from hydra_tune.core.states import Outcome
from hydra_tune.engine.unit import Role, Unit, UnitResult
from hydra_tune.engine.worker_processes import LocalProcesses, Processes
from hydra_tune.planner.question import Survey
from hydra_tune.planner.resolve import resolve
from hydra_tune.storage.details import POOL
from hydra_tune.strategies.base import Strategy
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
    processes: Callable[[Sequence[str]], Processes] = LocalProcesses
    """Makes the source of worker processes."""
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
        self._limits = self._make_limits()
        self.makespan = Makespan(len(self.devices))
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self.interrupted:
            self._interrupt()
        self.study = StudyThread(
            lambda: OwnedStudy(self.settings, self.space, self.source),
            Outage(self.settings.database_patience, self.display.show),
            on_broken=self._give_up,
        )
        with Signals(self._interrupt, self.display.restore_terminal):
            try:
                # The template imports torch while the database is opened.
                async with self._devices_at_work():
                    await self._run_study()
            except StorageError as error:
                if not self.again or not self.study.opened:
                    raise
                raise StorageError(error.message, f"{error.hint}; then go on with: {self.again}") from error
            except (OSError, MemoryError) as error:
                if not self.again:
                    raise
                hint = f"nothing is lost; go on with: {self.again}" if self.study.opened else "search again"
                raise MachineError.of(error, hint) from error

    async def _run_study(self) -> None:
        async with self.study:
            self._limits.total = self.study.total
            self.display.set_settings(dataclasses.replace(self.settings, trials=self.study.total))
            self.runner = TrialRunner(self._strategy, self.study, self._attempts())
            await self._run_trials()
            await self._trials.announced()
            line = self._makespan_line()
            if line and not self.runner.attempts.objective_seen:
                self.display.show(line)
            if self._trials.broken is not None:
                raise self._trials.broken

    # The devices of this machine; a search on a cluster has nodes instead

    def _make_limits(self) -> Limits:
        return Limits(self.settings, self._strategy, len(self.devices), self.failures)

    @asynccontextmanager
    async def _devices_at_work(self) -> AsyncIterator[None]:
        """Start the devices and import the build function there; end them at the end."""
        self.node = NodeRun(
            self.source, self.settings, self.devices, self.directories, self._strategy, observer=self,
            at_once=min(self.settings.trials, self._limits.at_once), rivals=self._rivals, show=self.display.show,
            cores=cores(), left=self._left, surveys=self.surveys, processes=self.processes,
        )  # fmt: skip
        async with self.node:
            await self.node.check_build_loads(self._stop)
            yield

    def _attempts(self) -> RunsAttempts:
        """Return what runs attempts; the study is open."""
        node = self.node
        self._spill = node.spill_watch(self.study, self._saw_spilled)
        self._attempts_here = AttemptRunner(
            settings=self.settings, source_file=node.source_file, strategy=node.strategy, engine=node.engine,
            study=self.study, files=self.study.files, profiles=self.profiles or self.study.files.profiles,
            admission=node.admission, stopping=self._stop.is_set, out_of_time=self._limits.ends_trials,
            on_candidates=self._expect_candidates, on_progress=self.display.trial_progress, show=self.display.show,
            directory_losses=self._directory_losses, look_at_spill=self._spill.look, at_once=node.at_once,
            on_room=self._room_for_more,
        )  # fmt: skip
        return self._attempts_here

    @asynccontextmanager
    async def _looked_after(self) -> AsyncIterator[None]:
        """Look after the spill store and the directories while trials run."""
        beside = (
            asyncio.create_task(self._spill.until_cancelled(), name="spill store"),
            asyncio.create_task(self._keep_directories(), name="directories"),
        )
        try:
            yield
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            self._spill.ended()

    def _makespan_line(self) -> str:
        return self.makespan.line()

    def _pool(self) -> dict[str, int]:
        """Return the memory budget of each device in bytes."""
        return {device.name: device.memory for device in self.devices}

    def _directory_losses(self) -> int:
        """Make removed directories of this run again; return how many times that was necessary."""
        return self.node.directory_losses(self.study, candidates=not self.runner.attempts.objective_seen)

    async def _keep_directories(self) -> None:
        """Check this run's directories repeatedly; end the search if a removed one cannot be made again."""
        try:
            await self.node.keep_directories(self._directory_losses)
        except (InputError, OSError) as error:
            self._trials.give_up(error)

    def _expect_candidates(self) -> None:
        """Allow one more trial in flight, as trials are now built apart from their devices."""
        if not self._limits.candidates_seen:
            self._limits.candidates_seen = True
            self._trials.limits_raised()
            self.node.candidates_seen()

    def _room_for_more(self) -> None:
        """Check whether another trial may begin, as the strategy's limit may have changed."""
        if hasattr(self, "_trials"):
            self._trials.limits_raised()

    def _left(self) -> int:
        return self._limits.left(self._trials.finished)

    def _rivals(self) -> int:
        return self._limits.rivals(self._trials.finished, self._trials.running)

    async def _run_trials(self) -> None:
        """Run the loop of trials, and beside it the task that looks for actions."""
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
        obeying = asyncio.create_task(actions.until_cancelled(), name="actions")
        async with self._looked_after():
            try:
                await self._trials.run(waiting, actions.look)
            finally:
                obeying.cancel()
                await asyncio.gather(*self._trials.cancel(), obeying, return_exceptions=True)

    def _show_beginning(self, finished: int) -> None:
        """Show and record that the search has begun."""
        self.display.search_started(self.study.study_id, finished)
        if self.again:
            self.display.show(f"if it is interrupted: {self.again}")
        self._record_pool()
        if finished >= self._limits.total:
            self.display.show(
                f"nothing is left to do: the study has {finished} trials, and trials={self._limits.total} is the total "
                f"(for 10 more give trials={finished + 10}, or n_trials=10)"
            )
        if self._limits.trials < self._limits.total:
            self.display.show(f"the grid has {self._limits.trials} points: the search ends there")

    def _record_pool(self) -> None:
        self.study.record_event(None, POOL, json.dumps(self._pool()))

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
        if name == "memory":
            self._attempts_here.measured(*args)
            return
        if name == "checkpointed" and unit.trial in self.runner.facts:
            self.runner.facts[unit.trial].checkpoints += 1
        self.study.answer(unit, name, args, reply)
