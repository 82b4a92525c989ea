"""One node's part in a search: runs attempts on its devices, and sends what comes of them to the coordinator."""

from __future__ import annotations

import asyncio
import pickle
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra_tune.cluster.line import Line
from hydra_tune.cluster.messages import (
    Answer,
    Attempt,
    Beat,
    Begin,
    Ended,
    OutOfTime,
    Piece,
    Ready,
    Share,
    Stopping,
    StopTrials,
    Whole,
)
from hydra_tune.cluster.node_devices import node_devices
from hydra_tune.cluster.node_study import NodeStudy, Reply
from hydra_tune.cluster.order import Order
from hydra_tune.cluster.shipping import CHECKPOINTS, Arriving, Sent, send_directory, send_weights, trial_of
from hydra_tune.cluster.source_files import source_at, write_files
from hydra_tune.coordinator.attempt_runner import AttemptRunner
from hydra_tune.coordinator.building import NO_TRIAL
from hydra_tune.coordinator.files import StudyFiles
from hydra_tune.coordinator.node_run import NodeRun
from hydra_tune.coordinator.run_directories import RunDirectories, run_directories
from hydra_tune.coordinator.trial_facts import TrialFacts
from hydra_tune.core.errors import HydraTuneError
from hydra_tune.core.states import Outcome, Status
from hydra_tune.engine.unit import Unit, UnitResult
from hydra_tune.planner.resolve import resolve
from hydra_tune.strategies.base import Interrupted
from hydra_tune.training.builds import Blueprint
from hydra_tune.training.checkpoint_files import CheckpointFiles
from hydra_tune.training.progress import Progress
from hydra_tune.training.remote_trial import TrialInfo


class NodeSearch:
    """Runs attempts for the coordinator at the other end of the line; the engine's observer on this node."""

    def __init__(self, begin: Begin, line: Line, order: Order) -> None:
        self._begin = begin
        self._line = line
        self._order = order
        self._study = NodeStudy(line, self._checkpointed)
        self._stopping, self._out_of_time = asyncio.Event(), False
        self._rivals = 1
        self._facts: dict[int, TrialFacts] = {}
        self._sent: dict[str, Sent] = {}
        self._sending: dict[str, asyncio.Task[None]] = {}
        """The last task that sends an attempt's checkpoint."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._attempts: AttemptRunner | None = None
        self._arriving = Arriving(self._place)

    async def run(self) -> None:
        """Start the devices, and run attempts until cancelled."""
        try:
            devices = node_devices(
                self._begin.settings.devices,
                self._begin.settings.device_memory,
                self._order.cpus,
                self._order.gpus,
                self._order.memory,
            )
            strategy = resolve(self._begin.settings.strategy, budgeted=self._begin.settings.device_memory is not None)
            strategy.check(len(devices))
            with run_directories(self._begin.settings.spill) as directories:
                folder = Path(directories.paths[-1]) / "source"
                write_files(self._begin.files, folder)
                self._node = NodeRun(
                    source_at(self._begin.source, folder), self._begin.settings, devices, directories, strategy,
                    observer=self, at_once=len(devices), rivals=lambda: self._rivals, show=self._show,
                    cores=self._order.cpus, python_path=[str(folder)],
                )  # fmt: skip
                async with self._node:
                    await self._node.check_build_loads(self._stopping)
                    await self._serve(directories)
        except HydraTuneError as error:
            self._line.send(Ready(error=error))
            await asyncio.Event().wait()  # the coordinator refuses this node, and closes the line

    async def _serve(self, directories: RunDirectories) -> None:
        self._files = StudyFiles(Path(directories.paths[-1]) / "study")
        self._files.directory.mkdir()
        node = self._node
        spill = node.spill_watch(self._study, self._saw_spilled)
        self._attempts = AttemptRunner(
            settings=self._begin.settings, source_file=node.source_file, strategy=node.strategy, engine=node.engine,
            study=self._study, files=self._files, profiles=self._files.directory / "profiles",
            admission=node.admission, stopping=self._stopping.is_set, out_of_time=lambda: self._out_of_time,
            on_candidates=self._saw_candidates, on_progress=self._progress, show=self._show,
            directory_losses=self._directory_losses, look_at_spill=spill.look, at_once=node.at_once,
        )  # fmt: skip
        beside = [asyncio.create_task(spill.until_cancelled()),
                  asyncio.create_task(node.keep_directories(self._directory_losses))]  # fmt: skip
        self._line.send(Ready(node.devices, node.admission.room.host))
        try:
            await asyncio.gather(*beside)
        finally:
            for task in [*beside, *self._tasks]:
                task.cancel()
            await asyncio.gather(*beside, *self._tasks, return_exceptions=True)

    def _directory_losses(self) -> int:
        assert self._attempts is not None
        return self._node.directory_losses(self._study, candidates=not self._attempts.objective_seen)

    # Messages of the coordinator

    async def handle(self, message: Any) -> None:
        """Carry out a message of the coordinator."""
        match message:
            case Beat(sent=sent, answers=None):
                self._line.send(Beat(time.time(), sent))
            case Attempt():
                task = asyncio.create_task(self._run(message), name=f"trial {message.info.number}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case Answer():
                self._study.answered(message)
            case Share(at_once=at_once, rivals=rivals):
                self._rivals = rivals
                if self._attempts is not None:
                    self._attempts.at_once = at_once
            case StopTrials(numbers=numbers):
                self._study.stopped |= set(numbers)
            case Stopping():
                self._stopping.set()
            case OutOfTime():
                self._out_of_time = True
            case Piece() | Whole():
                await asyncio.to_thread(self._arriving.take, message)

    def _place(self, attempt: str, kind: str) -> Path | None:
        """Return the directory for the checkpoints of a trial that is about to begin here."""
        number = trial_of(attempt)
        return self._files.checkpoints(number) if kind == CHECKPOINTS and number is not None else None

    # Attempts

    async def _run(self, given: Attempt) -> None:
        number, attempt = given.info.number, given.info.attempt
        checkpoints = self._files.checkpoints(number)
        info = replace(given.info, checkpoints=checkpoints, files=None)
        facts = self._facts[number] = given.facts
        self._study.attempts[number] = attempt
        self._sent[attempt] = Sent.of(checkpoints)
        try:
            outcome, error = await self._outcome(info, facts)
            self._line.send(Ended(number, attempt, outcome, facts, error))
        finally:
            self._tidy(number, attempt)

    async def _outcome(self, info: TrialInfo, facts: TrialFacts) -> tuple[Outcome | None, Exception | None]:
        """Run an attempt and send its files; return its outcome, None if it was interrupted, and an error not its own.

        Such an error is raised at the coordinator, and ends the search there.
        """
        assert self._attempts is not None
        try:
            outcome = await self._attempts.run(info, facts)
            if outcome.status is Status.COMPLETE:
                await send_weights(self._line, info.attempt, self._files.weights(info.number))
            return outcome, None
        except Interrupted:
            await self._send_checkpoints(info.number, info.attempt)
            return None, None
        except Exception as error:  # raised at the coordinator
            return None, _portable(error)

    def _tidy(self, number: int, attempt: str) -> None:
        task = self._sending.pop(attempt, None)
        if task is not None:
            task.cancel()
        self._sent.pop(attempt, None)
        self._facts.pop(number, None)
        self._study.attempts.pop(number, None)
        CheckpointFiles(self._files.checkpoints(number)).remove()
        self._files.weights(number).unlink(missing_ok=True)

    def _checkpointed(self, number: int) -> None:
        """Send a trial's new checkpoint while it goes on."""
        attempt = self._study.attempts[number]
        before = self._sending.get(attempt)
        if before is not None and not before.done():
            return  # the next one, or the end, sends what is there by then
        task = asyncio.create_task(self._send_checkpoints(number, attempt))
        self._sending[attempt] = task
        self._tasks.add(task)
        task.add_done_callback(self._sent_checkpoint)

    def _sent_checkpoint(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self._line.closed:
            self._show(f"a checkpoint could not be sent: {task.exception()}")

    async def _send_checkpoints(self, number: int, attempt: str) -> None:
        before = self._sending.get(attempt)
        if before is not None and before is not asyncio.current_task():
            await asyncio.wait([before])
        directory, sent = self._files.checkpoints(number), self._sent[attempt]
        if directory.is_dir():
            bytes_before = sent.bytes
            await send_directory(self._line, attempt, directory, sent)
            self._study.tell(number, attempt, "shipped", sent.bytes - bytes_before)

    # Called by attempts

    def _show(self, text: str) -> None:
        self._study.tell(None, "", "show", text)

    def _progress(self, number: int, blueprint: Blueprint, progress: Progress) -> None:
        self._study.tell(number, self._study.attempts.get(number, ""), "progress", blueprint, progress)

    def _saw_candidates(self) -> None:
        self._node.candidates_seen()
        self._study.tell(None, "", "candidates")

    def _saw_spilled(self, number: int, size: int) -> None:
        if number in self._facts:
            self._facts[number].saw_spilled(size)

    # Called by the engine (Observer)

    def unit_started(self, unit: Unit, device: str) -> None:
        if unit.trial != NO_TRIAL:
            self._study.unit("unit_started", unit, device)

    def unit_ended(self, unit: Unit, result: UnitResult) -> None:
        facts = self._facts.get(unit.trial)
        if facts is not None:
            facts.add(unit, result)
        if unit.trial != NO_TRIAL:
            self._study.unit_ended(unit, result)

    def worker_line(self, device: str, line: str) -> None:
        self._study.tell(None, "", "worker_line", device, line)

    def worker_lost(self, device: str, reason: str) -> None:
        self._show(reason)

    def late_result(self, unit: Unit, device: str) -> None:
        self._study.unit("late_result", unit, device)

    def call(self, unit: Unit, name: str, args: tuple[Any, ...], reply: Reply | None) -> None:
        if name == "stopping" and reply is not None:
            reply(self._stopping.is_set(), None)
            return
        if name == "memory" and self._attempts is not None:
            self._attempts.measured(*args)
            return
        if name == "checkpointed" and unit.trial in self._facts:
            self._facts[unit.trial].checkpoints += 1
            self._checkpointed(unit.trial)
        self._study.answer(unit, name, args, reply)


def _portable(error: Exception) -> Exception:
    """Return an error that can be pickled, with the same text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever an error's own pickling raises
        return HydraTuneError(f"{type(error).__name__}: {error}")
    return error
