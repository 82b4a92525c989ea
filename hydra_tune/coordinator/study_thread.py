"""The study for the event loop: everything that touches Optuna or the database runs on one thread, in order.

A sampler may take 50 ms and a commit waits for the disk; neither may block the event loop. The thread writes queued
changes in one transaction, and a trial's end is acknowledged only when it is on disk.

Methods that return something are awaited. Methods that only record return at once; their errors are logged.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from optuna.distributions import CategoricalDistribution

from hydra_tune.coordinator.files import StudyFiles
from hydra_tune.coordinator.outage import MOST_ROWS, Outage
from hydra_tune.coordinator.sampling import trial_limit
from hydra_tune.coordinator.study import Asked, OwnedStudy
from hydra_tune.coordinator.study_actions import carry_out, read_pending
from hydra_tune.core.errors import DatabaseAway
from hydra_tune.core.states import Outcome
from hydra_tune.engine.unit import Failure, StepRecord, Unit, UnitResult
from hydra_tune.storage.actions import Action
from hydra_tune.training.remote_trial import TrialInfo

logger = logging.getLogger(__name__)
T = TypeVar("T")
Reply = Callable[[Any, Failure | None], None]

FLUSH_SECONDS = 0.5
"""Seconds that a write nobody waits for, such as a report, may wait for its transaction."""
ACKNOWLEDGE_SECONDS = 0.02
"""Seconds that a write may wait for its transaction while a caller waits for the disk."""


class StudyThread:
    """An OwnedStudy on a separate thread; the event loop reaches it only through these methods."""

    study_id: int
    files: StudyFiles
    trial_limit: int | None
    """Number of trials after which the sampler has no more to propose."""
    total: int
    """Number of trials that the study is to have."""

    def __init__(
        self, open_study: Callable[[], OwnedStudy], outage: Outage, on_broken: Callable[[Exception], None]
    ) -> None:
        """`on_broken` is called on the event loop when nothing can be written any more."""
        self._open_study = open_study
        self._outage = outage
        self._on_broken = on_broken
        self._broken = False
        self.opened = False
        """True once the study was opened."""
        self._closing = threading.Event()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._acknowledge: list[Callable[[Exception | None], None]] = []
        self._thread = threading.Thread(target=self._main, name="hydra-study", daemon=True)
        self._study: OwnedStudy

    async def __aenter__(self) -> StudyThread:
        self._loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = self._loop.create_future()
        self._opened = _resolver(opened)
        self._thread.start()
        await opened
        self.opened = True
        self.study_id, self.files = self._study.study_id, self._study.files
        self.trial_limit = trial_limit(self._study.sampler)
        self.total = self._study.settings.trials
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._closing.set()
        self._work.put(None)
        await asyncio.to_thread(self._thread.join)
        if self._last_error is not None:
            raise self._last_error

    @property
    def stopped(self) -> set[int]:
        """Running trials that were asked to stop, or that another process has told."""
        return self._study.stopped

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the values of a trial."""
        return self._study.metrics

    @property
    def elsewhere(self) -> int:
        """Number of trials that ended meanwhile without having run in this search."""
        return self._study.elsewhere

    @property
    def ended_by_optuna(self) -> bool:
        """True once a sampler, a callback or an objective has stopped the study."""
        return self._study.study.asked_to_stop  # one flag, set once: it needs no lock

    async def on_disk(self) -> None:
        """Wait until all earlier changes are on disk."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        resolve = _resolver(future)
        self._work.put(lambda: self._acknowledge.append(lambda error: resolve(None, error)))
        await future

    # Trials

    async def interrupted(self) -> list[Asked]:
        """Continue the trials that an earlier run left unfinished."""
        return await self._call(self._study.interrupted)

    async def finished(self) -> int:
        """Count the trials of the study that have ended, in this run or before."""
        return await self._call(self._study.finished)

    async def ask(self) -> Asked:
        """Ask the sampler for a new trial."""
        return await self._call(self._study.ask)

    async def begin_attempt(self, asked: Asked, attempt: int, failed: tuple[str, Outcome] | None) -> TrialInfo:
        """Record an attempt, and the end of a failed one before it."""
        return await self._call(self._study.begin_attempt, asked, attempt, failed)

    def end_attempt(self, attempt: str, outcome: Outcome) -> None:
        """Record the end of an attempt."""
        self._post(self._study.end_attempt, attempt, outcome)

    async def epoch(self, number: int, epoch: int, metrics: dict[str, float]) -> bool:
        """Record an epoch's metrics; return True if the trial is to be pruned."""
        return await self._call(self._study.epoch, number, epoch, metrics)

    async def tell(self, number: int, attempt: str, outcome: Outcome, **facts: Any) -> tuple[Outcome, list[int]]:
        """End a trial; return its outcome and the trials whose weights are no longer among the best."""
        return await self._call(self._study.tell, number, attempt, outcome, **facts)

    async def suggest(self, number: int, attempt: str, name: str, choices: Sequence[str]) -> str:
        """Let the sampler choose one of `choices` for a trial, as a categorical parameter."""
        wanted = (name, CategoricalDistribution(tuple(choices)))
        found: int = await self._call(self._study.answer, number, attempt, "suggest", wanted)
        return choices[found]

    def answer(self, unit: Unit, name: str, args: tuple[Any, ...], then: Reply | None) -> None:
        """Answer a call of user code in a worker; `then(value, failure)` is called on the thread."""
        self._post(self._study.answer, unit.trial, unit.attempt, name, args, then=then)

    # Records

    def record_unit(self, unit: Unit, result: UnitResult) -> None:
        """Record a unit, or its steps if it has any."""
        self._post(self._study.work.unit, unit, result)

    def record_steps(self, number: int, attempt: str, device: str, steps: Sequence[StepRecord]) -> None:
        """Record steps of units that are not recorded one by one."""
        self._post(self._study.work.steps, number, attempt, device, None, steps)

    def record_late_result(self, unit: Unit, device: str) -> None:
        """Record a result of an attempt that no longer counts."""
        self._post(self._study.work.late_result, unit, device)

    def record_checkpoint(self, number: int, step: int, size: int, seconds: float) -> None:
        """Record a checkpoint of `size` bytes that took `seconds` to write."""
        self._post(self._study.records.checkpoint, number, step, size, seconds)

    def record_spilled(self, sampled: float, host_bytes: int, disk_bytes: int) -> None:
        """Record the bytes in the spill store."""
        self._post(self._study.records.spilled, sampled, host_bytes, disk_bytes)

    def record_event(self, number: int | None, kind: str, message: str) -> None:
        """Record an event of a trial, or of the study."""
        self._post(self._study.records.event, number, kind, message)

    # Actions

    async def pending_actions(self) -> list[Action]:
        """Read the unanswered actions; none while the database is away."""
        if self._outage.since is not None:
            return []
        return await self._call(read_pending, self._study)

    async def carry_out(self, action: Action, total: int, refusal: str) -> bool:
        """Carry out an action and answer it, or answer with the refusal; return True if it was carried out."""
        return await self._call(carry_out, self._study, action, total, refusal)

    # The thread

    async def _call(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """Return the result of `function(...)`, run on the thread."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        resolve = _resolver(future)

        def work() -> None:
            try:
                value = function(*args, **options)
            except Exception as error:  # raised where it is awaited
                resolve(None, error)
            else:
                resolve(value, None)

        self._work.put(work)
        return await future

    def _post(
        self,
        function: Callable[..., Any],
        *args: Any,
        then: Reply | None = None,
    ) -> None:
        """Run `function(...)` on the thread; `then(value, failure)` is called there."""

        def work() -> None:
            value, failure = None, None
            try:
                value = function(*args)
            except Exception as error:  # goes back to the user code that asked
                failure = Failure.of(error)
                if then is None:
                    logger.warning("%s", failure.message)
            if then is not None:
                then(value, failure)

        self._work.put(work)

    _last_error: Exception | None = None

    def _main(self) -> None:
        try:
            self._study = self._open_study()
        except Exception as error:  # raised where the thread is entered
            self._opened(None, error)
            return
        self._opened(None, None)
        try:
            self._work_until_closed()
        finally:
            try:
                self._study.close()
            except Exception as error:  # raised where the thread is left
                self._last_error = error

    def _work_until_closed(self) -> None:
        flushed = looked = time.monotonic()
        while True:
            # Writes that callers wait for are delayed a little, so that one transaction serves several.
            patience = ACKNOWLEDGE_SECONDS if self._acknowledge else FLUSH_SECONDS
            if self._outage.since is not None:
                patience = self._outage.pause
            left = flushed + patience - time.monotonic()
            if left <= 0:
                self._flush()
                flushed = time.monotonic()
                if flushed - looked >= FLUSH_SECONDS:
                    self._look_outside()
                    looked = time.monotonic()
                continue
            if self._outage.since is not None and self._study.storage.pending > MOST_ROWS and not self._broken:
                self._closing.wait(left)  # what callers wait for waits too
                if not self._closing.is_set():
                    continue
            try:
                work = self._work.get(timeout=left)
            except queue.Empty:
                continue
            if work is None:
                self._flush()
                return
            work()

    def _look_outside(self) -> None:
        try:
            self._study.look_outside()
        except Exception as failed:  # the database may be back at the next look
            logger.warning("the study could not be read: %s", failed)

    def _flush(self) -> None:
        """Flush the queue and report the result to the waiting callers; while the database is away they wait."""
        error: Exception | None = None
        try:
            self._study.flush()
            self._outage.ended()
        except DatabaseAway as away:
            self._outage.failed(away.message)
            if not (self._outage.over or self._broken or self._closing.is_set()):
                return
            error = away
        except Exception as failed:  # raised where the write is awaited
            error = failed
        if error is not None and not self._broken:
            self._broken = True
            logger.warning("the database could not be written: %s", error)
            self._loop.call_soon_threadsafe(self._on_broken, error)
        acknowledged, self._acknowledge = self._acknowledge, []
        for acknowledge in acknowledged:
            acknowledge(error)


def _resolver(future: asyncio.Future[Any]) -> Callable[[Any, Exception | None], None]:
    """Return a function that settles `future` from another thread."""
    loop = future.get_loop()

    def settle(value: Any, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)

    def from_anywhere(value: Any, error: Exception | None) -> None:
        loop.call_soon_threadsafe(settle, value, error)

    return from_anywhere
