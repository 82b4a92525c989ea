"""The coordinator of a search: ask Optuna for trials, train them on the pool, tell Optuna what came of them.

`search` is what users call. `Search` is the loop; it reads from top to bottom in `_run_trials`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import optuna

from hydra_tune.actions import Obeying
from hydra_tune.attempts import Ended, TrialRunner
from hydra_tune.builds import write_source
from hydra_tune.devices import Device, cores, parse_devices
from hydra_tune.display import Display, make_display
from hydra_tune.engine.engine import SLOTS, Engine
from hydra_tune.engine.scheduler import POLICIES
from hydra_tune.engine.unit import Role, Unit, UnitResult
from hydra_tune.errors import SearchFailed
from hydra_tune.files import run_directories
from hydra_tune.interrupts import Signals, run_in_event_loop
from hydra_tune.makespan import Makespan
from hydra_tune.planning.admission import Admission, Room, is_low
from hydra_tune.planning.planner import Planner
from hydra_tune.planning.pool import Pool
from hydra_tune.planning.rates import known_rates
from hydra_tune.planning.survey import Survey
from hydra_tune.result import SearchResult
from hydra_tune.sampling import make_pruner, make_sampler, trial_limit
from hydra_tune.settings import SearchSettings, make_settings
from hydra_tune.source import Build, PickledSource, Source
from hydra_tune.spill_watch import SpillWatch
from hydra_tune.states import Outcome, Status
from hydra_tune.storage.details import POOL
from hydra_tune.strategies.base import Strategy
from hydra_tune.strategies.registry import resolve
from hydra_tune.study import Asked, OwnedStudy
from hydra_tune.study_thread import StudyThread

logger = logging.getLogger(__name__)

SAME_FAILURES = 5
"""Trials that fail with one and the same error, with no other outcome before, until the search gives up."""
LOOK_AGAIN_SECONDS = 5.0
"""How often a search that is short of memory looks whether it still is."""
STOP_SECONDS = 30.0
"""How long an interrupted search waits for its trials to checkpoint; a second Ctrl-C does not wait."""


def search(
    build: Build,
    *,
    trials: int,
    metric: str | Sequence[str] = "loss",
    direction: str | Sequence[str] = "minimize",
    study: str | None = None,
    storage: str | None = None,
    devices: str = "auto",
    device_memory: str | int | None = None,
    spill: str | None = None,
    strategy: str | Mapping[str, Any] | Sequence[Any] = "auto",
    sampler: str | optuna.samplers.BaseSampler | None = "tpe",
    pruner: str | optuna.pruners.BasePruner | None = None,
    seed: int | None = None,
    timeout: float | None = None,
    resume: bool = False,
    concurrency: int | None = None,
    progress: bool = True,
    keep_weights: int = 10,
    checkpoint_seconds: float = 10.0,
    deadline: float | None = None,
    allow_changes: bool = False,
    stop_at_timeout: bool = False,
    enqueue: Sequence[Mapping[str, Any]] = (),
) -> SearchResult:
    """Search for the candidate with the best metric.

    `build(trial)` returns a `Candidate`, or a number as any Optuna objective does. `trials` is the total of the study:
    resuming a study of 10 with `trials=20` runs 10 more. After `timeout` seconds no trial is started; those that run
    are finished, or with `stop_at_timeout` end with the epochs they have. `enqueue` lists parameters to try first.
    Raises SearchFailed when no trial completed.
    """
    settings = make_settings(
        trials=trials, metric=metric, direction=direction, study=study, storage=storage, devices=devices,
        device_memory=device_memory, spill=spill, strategy=strategy, sampler=sampler, pruner=pruner, seed=seed,
        timeout=timeout, resume=resume, concurrency=concurrency, progress=progress, keep_weights=keep_weights,
        checkpoint_seconds=checkpoint_seconds, deadline=deadline, allow_changes=allow_changes,
        stop_at_timeout=stop_at_timeout, enqueue=enqueue,
    )  # fmt: skip
    return run_search(PickledSource.of(build), settings, space=getattr(build, "space", None), load_build=lambda: build)


def run_search(
    source: Source,
    settings: SearchSettings,
    *,
    space: Any = None,
    load_build: Callable[[], Build] | None = None,
    hint: str = "",
) -> SearchResult:
    """Run a search whose settings are already checked; `hint` is shown once it has started."""
    devices = parse_devices(settings.devices, settings.device_memory)
    # What is wrong with these shows before anything is created.
    resolve(settings.strategy, budgeted=settings.device_memory is not None).check(len(devices))
    make_sampler(settings.sampler, seed=settings.seed or 0, space=space)
    make_pruner(settings.pruner)
    with run_directories(settings.spill) as directories, make_display(settings, devices) as display:
        whole_search = Search(source, settings, devices, display, directories, space, hint)
        run_in_event_loop(whole_search)
    result = SearchResult(settings.storage, settings.study, load_build or source.load)
    if whole_search.interrupted:
        result.close()
        again = f"ht.search(..., study={settings.study!r}, resume=True)"
        raise KeyboardInterrupt(f"the search was interrupted; nothing is lost. Go on with {again}")
    if not result.completed:
        raise SearchFailed(f"no trial of study {settings.study!r} completed", whole_search.why_nothing_completed())
    return result


@dataclass
class Search:
    """One run of a search: the coordinator's side."""

    source: Source
    settings: SearchSettings
    devices: tuple[Device, ...]
    display: Display
    directories: tuple[str, ...]
    """For what processes hand to each other: the first one, and where spilled state goes when that is full."""
    space: Any = None
    hint: str = ""
    strategy: Strategy | None = None
    """By default that of the settings."""
    profiles: Path | None = None
    """Where the measured costs of models are kept; by default with the study's files."""
    surveys: dict[int, Survey] | None = None
    """To be filled with what looks at candidates show."""
    interrupted: bool = False
    failures: list[Outcome] = field(default_factory=list)
    others: int = 0
    """Trials that ended in this run other than by failing."""
    gave_up: bool = False
    _task: asyncio.Task[None] | None = None
    """The search itself, once it runs."""

    async def run(self) -> None:
        self._stop = asyncio.Event()
        self._more = asyncio.Event()
        """Set when the study has got more trials than before."""
        self._running: set[asyncio.Task[None]] = set()
        self._finished = 0
        self._candidates_seen = False
        self._announcements: set[asyncio.Task[None]] = set()
        self._broken: Exception | None = None
        self._deadline = None if self.settings.timeout is None else time.monotonic() + self.settings.timeout
        self._strategy = self.strategy or resolve(
            self.settings.strategy, budgeted=self.settings.device_memory is not None
        )
        self.makespan = Makespan(len(self.devices))
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self.interrupted:
            self._interrupt()
        at_once = min(self.settings.trials, self._concurrency)
        folder = self.source.folder()
        lazy = POLICIES[self._strategy.policy].lazy
        engine = Engine(
            self.devices,
            observer=self,
            directory=self.directories[0],
            overflow=self.directories[1:],
            python_path=[folder] if folder else [],
            expect=at_once,
            policy=POLICIES[self._strategy.policy],
            slots=1 if lazy or self._strategy.gangs or self._strategy.spans_devices else SLOTS,
            slots_alone=1 if self._strategy.gangs else SLOTS,
            warm=_imported_ahead(self._strategy),
        )
        cpus = [device.memory for device in self.devices if device.torch_device == "cpu"]
        admission = Admission(Room.here(self.directories, sum(cpus)), self.display.show)
        thread = StudyThread(lambda: OwnedStudy(self.settings, self.space, self.source))
        with Signals(self._interrupt, self.display.restore_terminal):
            # The workers import torch while the database is opened.
            async with engine, thread:
                self.study = thread
                self.runner = TrialRunner(
                    settings=self.settings,
                    source_file=write_source(self.source, self.directories[0]),
                    strategy=self._strategy,
                    engine=engine,
                    study=thread,
                    at_once=at_once,
                    admission=admission,
                    surveys=self.surveys,
                    planner=self._planner(admission.room) if self._strategy.plans else None,
                    files=thread.study.files,
                    profiles=self.profiles or thread.study.files.profiles,
                    stopping=self._stop.is_set,
                    out_of_time=self._ends_trials,
                    on_candidates=self._expect_candidates,
                    on_progress=self.display.trial_progress,
                    show=self.display.show,
                )
                await self._run_trials()
                await asyncio.gather(*self._announcements)
                if line := self.makespan.line():
                    self.display.show(line)
                if self._broken is not None:
                    raise self._broken

    def _planner(self, room: Room) -> Planner:
        pool = Pool.of(self.devices, host_bytes=room.host, disk_bytes=room.disk, cores=cores())
        known = known_rates()
        crowding = known.crowding if known is not None and pool.cpu and pool.devices > 1 else 1.0
        return Planner(pool, self._rivals, crowding=crowding)

    def _expect_candidates(self) -> None:
        """Trials are built apart from their devices from now on: one more can be in flight."""
        if not self._candidates_seen:
            self._candidates_seen = True
            self._more.set()

    def _rivals(self) -> int:
        """Trials that want devices: those in flight, and those to come as far as there is room for them."""
        to_come = max(0, self._limit - self._finished - len(self._running)) if self._may_ask(0) else 0
        return min(self._concurrency, len(self._running) + to_come)

    async def _run_trials(self) -> None:
        owned = self.study.study
        waiting: list[Asked] = await self.study.call(owned.interrupted)
        self._finished = await self.study.call(owned.finished)
        self.runner.tidy_left_overs({asked.number for asked in waiting})
        self.display.search_started(owned.study_id, self._finished)
        if self.hint:
            self.display.show(self.hint)
        self.study.post(owned.event, None, POOL, json.dumps({device.name: device.memory for device in self.devices}))
        if self._limit < self.settings.trials:
            self.display.show(f"the grid has {self._limit} points: the search ends there")
        running = self._running
        stopping = asyncio.create_task(self._stop.wait())
        more = asyncio.create_task(self._more.wait())
        actions = Obeying(self, self.study)
        obeying = asyncio.create_task(actions.until_cancelled(), name="actions")
        spill = SpillWatch(self.directories, partial(self.study.post, owned.spilled), self._lies)
        watching = asyncio.create_task(spill.until_cancelled(), name="spill store")
        try:
            while not self._stop.is_set():
                while self._has_room(running) and (waiting or self._may_ask(self._finished + len(running))):
                    asked = waiting.pop(0) if waiting else await self.study.call(owned.ask)
                    running.add(asyncio.create_task(self._run_trial(asked), name=f"trial {asked.number}"))
                if not running:
                    # What was asked before the search began or at its last moment still counts.
                    await actions.look()
                    if not self._may_ask(self._finished):
                        return
                    continue
                done, _ = await asyncio.wait(
                    {*running, stopping, more}, return_when=asyncio.FIRST_COMPLETED, timeout=self._look_again(running)
                )
                if more in done:
                    self._more.clear()
                    more = asyncio.create_task(self._more.wait())
                for task in done & running:
                    task.result()
                    self._finished += 1
                running -= done
            # Candidates checkpoint and stop by themselves after their slice; an objective cannot be asked to.
            await asyncio.wait([stopping, *running], timeout=STOP_SECONDS)
        finally:
            for waiter in (stopping, more, obeying, watching):
                waiter.cancel()
            for task in running:
                task.cancel()
            await asyncio.gather(*running, obeying, watching, return_exceptions=True)
            spill.ended()

    def _has_room(self, running: set[asyncio.Task[None]]) -> bool:
        """Whether one more trial may begin; while the machine is short of memory, only when none runs."""
        return len(running) < self._concurrency and not (running and is_low())

    def _look_again(self, running: set[asyncio.Task[None]]) -> float | None:
        """Seconds after which there may be room for one more trial, though none has ended: memory comes back."""
        held_back = len(running) < self._concurrency and self._may_ask(self._finished + len(running))
        return LOOK_AGAIN_SECONDS if held_back else None

    @property
    def _concurrency(self) -> int:
        # One more than devices where trials move: while one is cut or saved in the builder, every device has another.
        if self.settings.concurrency is not None:
            return self.settings.concurrency
        if self._strategy.plans and not self._strategy.builds_apart and not self._candidates_seen:
            return len(self.devices)  # an objective takes a device each, and candidates are not known to come yet
        return self._strategy.trials_at_once(len(self.devices))

    @property
    def _limit(self) -> int:
        return min(self.settings.trials, trial_limit(self.study.study.sampler) or self.settings.trials)

    def _may_ask(self, trials: int) -> bool:
        return trials < self._limit and not self._out_of_time() and not self.gave_up

    def _out_of_time(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def _ends_trials(self) -> bool:
        return self.settings.stop_at_timeout and self._out_of_time()

    # What actions may do

    def stop_on_request(self) -> None:
        self.interrupted = True
        self._stop.set()
        self.display.show("stopping on request: running trials are checkpointed first")

    def total(self) -> int:
        return self.settings.trials

    def room_for(self, trials: int) -> str:
        points = trial_limit(self.study.study.sampler)
        return f"the grid has {points} points" if points is not None and trials > points else ""

    def set_total(self, trials: int) -> None:
        self.settings = dataclasses.replace(self.settings, trials=trials)
        self.display.set_settings(self.settings)
        self._more.set()

    async def _run_trial(self, asked: Asked) -> None:
        self.display.trial_started(asked.number)
        ended = await self.runner.run(asked)
        if ended is None:
            return
        self._note(ended.outcome)
        announcement = asyncio.create_task(self._announce(asked.number, ended))
        self._announcements.add(announcement)
        announcement.add_done_callback(self._announcements.discard)

    async def _announce(self, number: int, ended: Ended) -> None:
        """Say how a trial ended once that is on disk; the next trial need not wait for it."""
        try:
            await self.study.on_disk()
        except Exception as error:  # noqa: BLE001 - raised at the end of the search
            # Results that cannot be kept are not worth computing.
            self._broken = self._broken or error
            self._stop.set()
            return
        outcome = ended.outcome
        logger.info("trial %d: %s%s", number, outcome.status, f" ({outcome.error})" if outcome.error else "")
        self.display.trial_ended(number, outcome)
        self.runner.tidy(number, ended)

    def _note(self, outcome: Outcome) -> None:
        """Give up when every trial fails in the same way: the mistake is in the search, not in the trials."""
        if outcome.status not in (Status.FAILED, Status.LOST, Status.HUNG):
            self.others += 1
            return
        if not self.failures and outcome.traceback:
            self.display.show(outcome.traceback.rstrip())
        self.failures.append(outcome)
        same = all(_alike(failure) == _alike(self.failures[0]) for failure in self.failures)
        if not self.others and same and len(self.failures) >= SAME_FAILURES and not self.gave_up:
            self.gave_up = True
            self.display.show(f"giving up: {self.why_nothing_completed()}")

    def why_nothing_completed(self) -> str:
        """One line for a search that completed nothing."""
        if not self.failures:
            return "all trials were pruned, diverged or ran out of memory or time; `trials` shows each one's reason"
        times = f"the first {len(self.failures)} trials failed alike" if self.gave_up else "the first failure"
        return f"{times}: {self.failures[0].error}"

    def interrupt_from_outside(self) -> None:
        """Stop, as for Ctrl-C; the second time at once. From another thread than the search's own."""
        again, self.interrupted = self.interrupted, True
        if self._task is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._task.cancel if again else self._interrupt)

    def _interrupt(self) -> None:
        self.interrupted = True
        self._stop.set()
        self.display.show("stopping: running trials are checkpointed first; Ctrl-C again stops at once")

    # What the engine observes

    def unit_started(self, unit: Unit, device: str) -> None:
        self.display.unit_started(unit, device)

    def unit_ended(self, unit: Unit, result: UnitResult) -> None:
        facts = self.runner.facts.get(unit.trial)
        if facts is not None:
            facts.add(unit, result)
            if unit.role is Role.DEVICE:
                self.makespan.add(unit.trial, result.started, result.seconds)
            if unit.recorded:
                self.study.post(self.study.study.unit, unit, result)
        self.display.unit_ended(unit, result)

    def _lies(self, number: int, size: int) -> None:
        facts = self.runner.facts.get(number)
        if facts is not None:
            facts.lies(size)

    def worker_line(self, device: str, line: str) -> None:
        self.display.show(f"[{device}] {line}")

    def worker_lost(self, device: str, reason: str) -> None:
        self.display.show(reason)

    def late_result(self, unit: Unit, device: str) -> None:
        self.study.post(self.study.study.late_result, unit, device)

    def call(self, unit: Unit, name: str, args: tuple[Any, ...], reply: Callable[[Any, Any], None] | None) -> None:
        if name == "stopping" and reply is not None:
            reply(self._stop.is_set(), None)
            return
        if name == "checkpointed" and unit.trial in self.runner.facts:
            self.runner.facts[unit.trial].checkpoints += 1
        self.study.post(self.study.study.answer, unit.trial, unit.attempt, name, args, then=reply)


def _imported_ahead(strategy: Strategy) -> dict[Role, Sequence[str]]:
    """What workers are going to import for their units, and can while the first candidates are on their way."""
    if not (strategy.builds_apart or strategy.plans):
        return {}
    optimizers = "torch._dynamo"  # the first optimizer of a process imports it, for more than a second
    surveys = ("hydra_tune.planning.survey",) if strategy.plans else ()
    return {Role.DEVICE: (optimizers,), Role.BUILDER: (optimizers, *surveys)}


def _alike(outcome: Outcome) -> tuple[Status, str]:
    """A failure without its numbers: processes and devices differ where the reason is the same."""
    return outcome.status, re.sub(r"\d+", "#", outcome.error)
