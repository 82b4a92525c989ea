"""A thread for the study: everything that touches Optuna or the database runs on it, in order.

A sampler may think for 50 ms and a commit waits for the disk; neither may stop the event loop. The thread writes what
has gathered in one transaction, and a trial's end is acknowledged only when it is on disk.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from hydra_tune.engine.unit import Failure
from hydra_tune.study import OwnedStudy

logger = logging.getLogger(__name__)
T = TypeVar("T")

FLUSH_SECONDS = 0.5
"""How long what nobody waits for, such as a report, may wait for its transaction."""
ACKNOWLEDGE_SECONDS = 0.02
"""The same, where somebody waits for it to be on disk."""


class StudyThread:
    """Runs the methods of an OwnedStudy in order on its own thread."""

    def __init__(self, open_study: Callable[[], OwnedStudy]) -> None:
        self._open_study = open_study
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._acknowledge: list[Callable[[Exception | None], None]] = []
        self._thread = threading.Thread(target=self._main, name="hydra-study", daemon=True)
        self.study: OwnedStudy

    async def __aenter__(self) -> StudyThread:
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._opened = _resolver(opened)
        self._thread.start()
        await opened
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._work.put(None)
        await asyncio.to_thread(self._thread.join)
        if self._last_error is not None:
            raise self._last_error

    async def call(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        """The result of `function(...)`, run on the thread."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        resolve = _resolver(future)

        def work() -> None:
            try:
                value = function(*args, **options)
            except Exception as error:  # noqa: BLE001 - raised where it is awaited
                resolve(None, error)
            else:
                resolve(value, None)

        self._work.put(work)
        return await future

    async def on_disk(self) -> None:
        """Wait until all that was done before is on disk."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        resolve = _resolver(future)
        self._work.put(lambda: self._acknowledge.append(lambda error: resolve(None, error)))
        await future

    def post(
        self,
        function: Callable[..., Any],
        *args: Any,
        then: Callable[[Any, Failure | None], None] | None = None,
    ) -> None:
        """Run `function(...)` on the thread; `then(value, failure)` is called there."""

        def work() -> None:
            value, failure = None, None
            try:
                value = function(*args)
            except Exception as error:  # noqa: BLE001 - goes back to the user code that asked
                failure = Failure.of(error)
                if then is None:
                    logger.warning("%s", failure.message)
            if then is not None:
                then(value, failure)

        self._work.put(work)

    _last_error: Exception | None = None

    def _main(self) -> None:
        try:
            self.study = self._open_study()
        except Exception as error:  # noqa: BLE001 - raised where the thread is entered
            self._opened(None, error)
            return
        self._opened(None, None)
        try:
            self._work_until_closed()
        finally:
            try:
                self.study.close()
            except Exception as error:  # noqa: BLE001 - raised where the thread is left
                self._last_error = error

    def _work_until_closed(self) -> None:
        flushed = time.monotonic()
        while True:
            # Those who wait for the disk wait a little for each other, so that one transaction serves several.
            patience = ACKNOWLEDGE_SECONDS if self._acknowledge else FLUSH_SECONDS
            left = flushed + patience - time.monotonic()
            if left <= 0:
                self._flush()
                flushed = time.monotonic()
                continue
            try:
                work = self._work.get(timeout=left)
            except queue.Empty:
                continue
            if work is None:
                self._flush()
                return
            work()

    def _flush(self) -> None:
        """Write what has gathered; whoever waits for it learns whether that worked. What failed is tried again."""
        error = None
        try:
            self.study.flush()
        except Exception as failed:  # noqa: BLE001 - raised where the write is awaited
            error = failed
            logger.warning("the database could not be written: %s", failed)
        acknowledged, self._acknowledge = self._acknowledge, []
        for acknowledge in acknowledged:
            acknowledge(error)


def _resolver(future: asyncio.Future[Any]) -> Callable[[Any, Exception | None], None]:
    """A function that settles `future` from another thread."""
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
