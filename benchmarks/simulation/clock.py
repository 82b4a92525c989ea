"""An event loop on a virtual clock, and threads that run in lock-step with it.

The loop never waits: when nothing is ready, its clock jumps to the next timer. Threads hand a baton back and forth with
the loop, so that only one of all runs at a time and a run depends on nothing but its seed. The names that a module uses
of `threading`, `queue` and `time` are replaced by those here (`simulated_time`); the module's own code is unchanged.
"""

from __future__ import annotations

import _thread
import asyncio
import queue
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

TICK = 1e-6
"""Seconds that the clock moves on with each jump: rounding never leaves a timer just ahead of the clock."""
BEGIN = 1_800_000_000.0
"""Time of day at which a simulation begins, in seconds since 1970."""


class Deadlock(Exception):
    """Nothing is ready, and no timer is set."""


class TooLong(Exception):
    """The simulation has gone beyond the time in which it must end."""


class _NoFiles(selectors.BaseSelector):
    """Has no files to wait for, and jumps instead of waiting."""

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        self._jump = jump
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = self._keys[fileobj] = selectors.SelectorKey(fileobj, 0, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._jump(timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time is virtual; `limit` is the time by which everything must have ended."""

    def __init__(self, limit: float) -> None:
        self.now = 0.0
        self._limit = limit
        self.errors: list[str] = []
        """Exceptions that nobody awaited."""
        self.back = _thread.allocate_lock()
        """Held while a thread in lock-step runs."""
        self.back.acquire()
        self.threads: list[Thread] = []
        super().__init__(_NoFiles(self._jump))
        self.set_exception_handler(lambda _loop, context: self.errors.append(repr(context.get("exception") or context)))

    def time(self) -> float:
        return self.now

    def pass_time(self, seconds: float) -> None:
        """Let time pass in which this process does not run."""
        self.now += seconds

    def _jump(self, timeout: float | None) -> None:
        if timeout is None:
            raise Deadlock(f"at {self.now:.3f} s")
        if timeout > 0:
            self.now += timeout + TICK
        if self.now > self._limit:
            raise TooLong(f"after {self._limit:g} s")

    def _write_to_self(self) -> None:
        """Do nothing: the loop does not sleep, so that nobody needs to wake it."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Call at once; to join a thread, wait for its end."""
        future: asyncio.Future[Any] = self.create_future()
        inner = getattr(func, "args", (None,))[0]
        thread = getattr(inner, "__self__", None)
        if isinstance(thread, Thread):
            thread.when_done(lambda: future.done() or future.set_result(None))
            return future
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class Thread:
    """A thread in lock-step with the loop: `threading.Thread` for simulated modules."""

    def __init__(
        self, loop: VirtualLoop, latency: Callable[[], float], target: Callable[[], None], name: str = "",
        daemon: bool = True,
    ) -> None:  # fmt: skip
        """`latency` returns the seconds that a wake-up takes."""
        self._loop = loop
        self._latency = latency
        self._target = target
        self._turn = _thread.allocate_lock()
        self._turn.acquire()
        self.done = False
        self.error: BaseException | None = None
        self._then: list[Callable[[], object]] = []
        self._waits = 0
        """Number of the present wait, for wake-ups that come too late for theirs."""

    def start(self) -> None:
        self._loop.threads.append(self)
        threading.Thread(target=self._main, daemon=True).start()
        self._loop.call_soon(self._step)

    def join(self) -> None:
        """Wait for the end, from another thread in lock-step."""
        current = _current(self._loop)
        while not self.done:
            self.when_done(current.waker())
            current.block(None)

    def when_done(self, then: Callable[[], object]) -> None:
        if self.done:
            self._loop.call_soon(then)
        else:
            self._then.append(then)

    def waker(self) -> Callable[[], None]:
        """Return a function that ends the wait which begins now."""
        number = self._waits + 1
        return lambda: self._wake(number)

    def block(self, timeout: float | None) -> None:
        """Give the baton back until woken or until the time is up; call on this thread."""
        self._waits += 1
        number, timer = self._waits, None
        if timeout is not None:
            timer = self._loop.call_later(timeout, self._wake, number)
        self._hand_back()
        if timer is not None:
            timer.cancel()

    def _wake(self, number: int) -> None:
        if number == self._waits and not self.done:
            self._waits += 1  # woken once
            self._loop.call_later(self._latency(), self._step)

    def _step(self) -> None:
        """Let the thread run until it blocks or ends; call on the loop's thread."""
        _running[self._loop] = self
        self._turn.release()
        self._loop.back.acquire()
        del _running[self._loop]
        if self.done:
            for then in self._then:
                then()

    def _hand_back(self) -> None:
        self._loop.back.release()
        self._turn.acquire()

    def _main(self) -> None:
        self._turn.acquire()
        try:
            self._target()
        except BaseException as error:
            self.error = error
        self.done = True
        self._loop.back.release()


_running: dict[VirtualLoop, Thread] = {}


def _current(loop: VirtualLoop) -> Thread:
    return _running[loop]


class SimpleQueue:
    """`queue.SimpleQueue` for simulated modules."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._items: deque[Any] = deque()
        self._waiting: Callable[[], None] | None = None

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            waiting()

    def get(self, timeout: float | None = None) -> Any:
        if not self._items:
            current = _current(self._loop)
            self._waiting = current.waker()
            current.block(timeout)
            self._waiting = None
        if not self._items:
            raise queue.Empty
        return self._items.popleft()


class Event:
    """`threading.Event` for simulated modules."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._set = False
        self._waiting: list[Callable[[], None]] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            current = _current(self._loop)
            self._waiting.append(current.waker())
            current.block(timeout)
        return self._set


@contextmanager
def simulated_time(loop: VirtualLoop, latency: Callable[[], float], modules: list[Any]) -> Iterator[None]:
    """Give all modules the virtual time, and these modules threads in lock-step."""
    threads = SimpleNamespace(
        Thread=lambda target, name="", daemon=True: Thread(loop, latency, target, name, daemon),
        Event=lambda: Event(loop), Lock=threading.Lock, RLock=threading.RLock,
    )  # fmt: skip
    queues = SimpleNamespace(SimpleQueue=lambda: SimpleQueue(loop), Empty=queue.Empty)
    with ExitStack() as patches:
        for name in ("monotonic", "perf_counter"):
            patches.enter_context(patch.object(time, name, lambda: loop.now))
        patches.enter_context(patch.object(time, "time", lambda: BEGIN + loop.now))
        for module in modules:
            if hasattr(module, "threading"):
                patches.enter_context(patch.object(module, "threading", threads))
            if hasattr(module, "queue"):
                patches.enter_context(patch.object(module, "queue", queues))
            if hasattr(module, "_clock"):
                patches.enter_context(patch.object(module, "_clock", lambda: loop.now))
        yield
