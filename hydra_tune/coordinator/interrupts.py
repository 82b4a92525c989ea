"""Stops a search from outside: by signals, and in a notebook by its interrupt.

After the first interrupt the search checkpoints its trials and ends; the second ends it at once.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol


class Interruptible(Protocol):
    """The part of a search that is needed to interrupt it."""

    async def run(self) -> None: ...

    def interrupt_from_outside(self) -> None:
        """Checkpoint the trials and stop; at the second call stop at once. May be called from any thread."""
        ...


def run_in_event_loop(search: Interruptible) -> None:
    """Run the search; in a notebook, which has a running loop already, on a separate thread."""
    if asyncio._get_running_loop() is None:
        asyncio.run(search.run())
        return None
    done: Future[None] = Future()

    def run() -> None:
        try:
            done.set_result(asyncio.run(search.run()))
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            done.set_exception(error)

    with _notebook_interrupts(search):
        threading.Thread(target=run, name="hydra-search").start()
        try:
            return done.result()
        except asyncio.CancelledError:
            return None  # the second interrupt


@contextmanager
def _notebook_interrupts(search: Interruptible) -> Iterator[None]:
    """Make the notebook's interrupt stop the search like Ctrl-C, without breaking off the wait for it.

    Catching a KeyboardInterrupt and acting on it would leave a moment in which the next one escapes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: search.interrupt_from_outside())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Signals:
    """While active, Ctrl-C and SIGTERM call `stop`; a second one ends the process at once."""

    def __init__(self, stop: Callable[[], None], restore_terminal: Callable[[], None]) -> None:
        self._stop = stop
        self._restore_terminal = restore_terminal
        self._before: dict[int, Any] = {}
        self._stopping = False

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)

    def __exit__(self, *_exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self._stopping:
            self._restore_terminal()
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._stopping = True
        self._loop.call_soon_threadsafe(self._stop)
