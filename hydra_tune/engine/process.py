"""The coordinator's side of one worker process: starts it, exchanges messages, notices its death."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import re
import signal
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from hydra_tune.core.devices import format_bytes
from hydra_tune.engine.channel import Channel, Closed
from hydra_tune.engine.launch import Launched, Launcher
from hydra_tune.engine.messages import Setup
from hydra_tune.engine.reaper import Reaper

logger = logging.getLogger(__name__)

_TAIL_LINES = 200
_CHUNK = 1 << 16
_LONGEST_LINE = 10_000
DUMP_SECONDS = 1.0
"""Seconds that a hung worker gets to dump its stacks before it is killed."""


class WorkerProcess:
    """A worker process with its message socket and output pipe.

    `multiprocessing` is not used: it would import the user's `__main__` again in every worker, which breaks notebooks
    and scripts without a main guard. Lines that the worker prints are passed on one by one, so that they do not tear
    the live display; the last lines help to explain a death.
    """

    def __init__(
        self,
        setup: Setup,
        launcher: Launcher,
        reaper: Reaper,
        on_message: Callable[[Any], None],
        on_line: Callable[[str], None],
    ) -> None:
        self.setup = setup
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._launcher = launcher
        self._on_message = on_message
        self._on_line = on_line
        self._reaper = reaper
        self._text = b""
        self._killed = False
        self._killed_because = ""
        self._launched: Launched | None = None
        self._ending = -1
        self._closed = asyncio.Event()

    @property
    def pid(self) -> int:
        """Process id; -1 before the process runs."""
        return -1 if self._launched is None else self._launched.pid

    def start(self) -> None:
        """Request the process and send the setup message, which waits in the socket until the process runs."""
        ours, theirs = socket.socketpair()
        self._output, output = os.pipe()
        os.set_blocking(self._output, False)
        self._channel = Channel(ours)
        loop = asyncio.get_running_loop()
        loop.add_reader(ours.fileno(), self._read)
        loop.add_reader(self._output, self._read_output)
        self._launcher.launch(theirs, output, self.setup.threads, self._on_launched)
        self.send(self.setup)

    def _on_launched(self, launched: Launched | None) -> None:
        if launched is None:
            self._closed.set()
            return
        self._launched = launched
        # Before any user code can run, which starts with the first unit.
        self._reaper.watch(launched.pid)
        # Watch the process, not the socket: a child that user code forked may keep the socket open.
        try:
            self._ending = os.pidfd_open(launched.pid)
        except ProcessLookupError:  # the worker and its template have ended, and another process has collected it
            self._closed.set()
            return
        asyncio.get_running_loop().add_reader(self._ending, self._on_end)
        if self._killed:
            self._signal(signal.SIGKILL)

    def send(self, message: object) -> None:
        """Send a message to the worker, from any thread. Messages to a dead worker are dropped."""
        try:
            self._channel.send(message)
        except Closed:
            # The reader notices the closed socket too and reports the loss.
            return

    async def closed(self) -> None:
        """Wait until the worker process has ended."""
        await self._closed.wait()

    async def dump_stacks(self) -> str:
        """Return the stacks of all the worker's threads, written by the worker itself; empty if it cannot."""
        self.tail.clear()
        self._signal(signal.SIGUSR1)
        await asyncio.sleep(DUMP_SECONDS)
        return "\n".join(self.tail)

    def kill(self, because: str = "") -> None:
        self._killed = True
        self._killed_because = self._killed_because or because
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        # Signal by pidfd, which cannot refer to another process that has reused the pid.
        if self._launched is not None and not self._closed.is_set():
            signal.pidfd_send_signal(self._ending, number)

    async def reap(self) -> str:
        """Kill the rest of the ended process's group and collect the process; return how it ended."""
        if self._launched is None:
            self._release()
            return "was not started"
        # In this order: until the process is collected, its pid, which is also its group's id, is not reused. If its
        # template has ended too, init may have collected it already.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._reaper.forget(self.pid)
        exit = await self._launched.collect()
        self._read_output()
        if self._text:
            self._show(self._text)
        self._release()
        if self._killed_because:
            return f"was killed: {self._killed_because}"
        if exit.code is None:
            return "ended; nobody knows how, as the process that could have told has ended too"
        if exit.code >= 0:
            return f"exited with code {exit.code}: what ran in it called os._exit, or a library did"
        if -exit.code == signal.SIGKILL:
            exact = exit.peak_kib > self._launched.inherited_kib
            peak = f"{'up to' if exact else 'less than'} {format_bytes(exit.peak_kib * 1024)}"
            return f"was killed (signal 9), probably out of host memory: it had taken {peak}"
        name = signal.Signals(-exit.code).name
        crash = -exit.code in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT)
        return f"was killed (signal {-exit.code}, {name}){': native code that ran in it crashed' if crash else ''}"

    def _release(self) -> None:
        loop = asyncio.get_running_loop()
        for end in (self._channel.fileno(), self._output):
            loop.remove_reader(end)
        self._channel.close()
        os.close(self._output)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._ending)
        os.close(self._ending)
        self._read()  # its last messages
        self._closed.set()

    def _read(self) -> None:
        try:
            arrived = self._channel.receive_ready()
        except Closed:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            return
        for data in arrived:
            try:
                self._on_message(pickle.loads(data))
            except Exception as error:
                # A caller that awaits this message would wait for ever, so the worker is given up as lost.
                logger.exception("a message of worker %s", self.setup.device)
                self.kill(f"it sent what cannot be read ({type(error).__name__}: {error})")
                return

    def _read_output(self) -> None:
        """Pass printed lines on, at most one chunk per call, so that much output does not block the event loop."""
        try:
            data = os.read(self._output, _CHUNK)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._output)
        *lines, self._text = re.split(rb"\r\n|\n|\r", self._text + data)
        for line in lines:
            self._show(line)
        if len(self._text) > _LONGEST_LINE:
            self._show(self._text)
            self._text = b""

    def _show(self, line: bytes) -> None:
        text = line[:_LONGEST_LINE].decode(errors="replace")
        self.tail.append(text)
        self._on_line(text)
