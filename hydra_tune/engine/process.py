"""The coordinator's end of one worker process: starting it, talking to it, noticing its death."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import re
import resource
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra_tune.devices import format_bytes
from hydra_tune.engine.channel import Channel, Closed
from hydra_tune.engine.messages import Setup
from hydra_tune.engine.reaper import Reaper

logger = logging.getLogger(__name__)

_TAIL_LINES = 200
_CHUNK = 1 << 16
_LONGEST_LINE = 10_000
MEMORY_SETTINGS = {
    "MALLOC_ARENA_MAX": "1",
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_MMAP_THRESHOLD_": str(16 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(64 * 2**20),
}
"""How a worker's C library keeps freed memory; the user's own settings come first, and only glibc reads them.

As it comes, glibc keeps freed blocks of up to 32 MiB in a heap for each thread: a sharded training stood 600 MiB above
a budget of 256. Giving everything back at once means new pages for every tensor, which took a quarter of its time. One
heap that keeps blocks of up to 16 MiB is within the budget's tolerance, and as quick as keeping all. Tensors of 2 MiB
and more lie in huge pages: a third of the time in the kernel was for the faults of small ones.
"""
DUMP_SECONDS = 1.0
"""How long a hung worker has to write its stacks before it is killed."""


class WorkerProcess:
    """A spawned `hydra_tune.engine.worker` and its pipe.

    A plain subprocess rather than `multiprocessing`: that would import the user's `__main__` again in every worker,
    which breaks notebooks and scripts without a main guard. What the worker prints comes back line by line, so that it
    can be shown without tearing the live display, and its last lines explain a death.
    """

    def __init__(
        self, setup: Setup, on_message: Callable[[Any], None], on_line: Callable[[str], None], reaper: Reaper
    ) -> None:
        self.setup = setup
        self.pid = -1
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._on_message = on_message
        self._on_line = on_line
        self._reaper = reaper
        self._text = b""
        self._killed_because = ""
        self._closed = asyncio.Event()

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        environment = dict(os.environ)
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            environment[name] = str(self.setup.threads)
        # Gangs are on this machine; gloo would look for an interface by the host's name, which need not resolve.
        environment = MEMORY_SETTINGS | {"GLOO_SOCKET_IFNAME": "lo"} | environment
        environment["PYTHONUNBUFFERED"] = "1"
        # Not the current folder first on the path, where a user's queue.py would stand in for Python's; the user's own
        # path comes with the first message.
        environment["PYTHONSAFEPATH"] = "1"
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        self._inherited_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hydra_tune.engine.worker", str(theirs.fileno())],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()], env=environment, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        self.pid = self._process.pid
        # Before it can run anything of the user's, which starts with the first message.
        self._reaper.watch(self.pid)
        self._channel = Channel(ours)
        assert self._process.stdout is not None
        self._output = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        loop = asyncio.get_running_loop()
        # Its end is seen at the process, not at the line: a child that user code forked may hold that open.
        self._ending = os.pidfd_open(self.pid)
        loop.add_reader(self._ending, self._on_end)
        loop.add_reader(ours.fileno(), self._read)
        loop.add_reader(self._output.fileno(), self._read_output)
        self.send(self.setup)

    def send(self, message: object) -> None:
        """Say something to the worker; safe from any thread. What a dead worker no longer hears is lost with it."""
        try:
            self._channel.send(message)
        except Closed:
            # The reader sees the end of the line too and reports the loss; one place is enough.
            return

    async def closed(self) -> None:
        """Wait until the worker has closed its end, which it does only by ending."""
        await self._closed.wait()

    async def dump_stacks(self) -> str:
        """What every thread of the worker is doing, as the worker itself writes it; empty where it cannot."""
        self.tail.clear()
        self._signal(signal.SIGUSR1)
        await asyncio.sleep(DUMP_SECONDS)
        return "\n".join(self.tail)

    def kill(self, because: str = "") -> None:
        self._killed_because = self._killed_because or because
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        # Not through Popen, which would collect a process that has just ended, out of turn.
        if not self._closed.is_set():
            signal.pidfd_send_signal(self._ending, number)

    def reap(self) -> str:
        """End what the ended process left behind, and collect it; says how it ended."""
        # In this order: until it is collected, its number, which is also its group's, is no other's.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._reaper.forget(self.pid)
        _, status, usage = os.wait4(self.pid, 0)
        code = self._process.returncode = os.waitstatus_to_exitcode(status)
        self._read_output()
        if self._text:
            self._show(self._text)
        self._release()
        if self._killed_because:
            return f"was killed: {self._killed_because}"
        if code >= 0:
            return f"exited with code {code}"
        if -code == signal.SIGKILL:
            return f"was killed (signal 9), probably out of host memory: {self._memory(usage.ru_maxrss)}"
        return f"was killed (signal {-code}, {signal.Signals(-code).name})"

    def _memory(self, peak: int) -> str:
        """The most memory that the process had, by the kernel's own count (in KiB).

        That count starts at what the process that started it had, so that only a larger one says something exact.
        """
        exact = peak > self._inherited_peak
        return f"it had taken {'up to' if exact else 'less than'} {format_bytes(peak * 1024)}"

    def _release(self) -> None:
        loop = asyncio.get_running_loop()
        for end in (self._channel, self._output):
            loop.remove_reader(end.fileno())
            end.close()

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._ending)
        os.close(self._ending)
        self._read()  # what it said last
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
                # Whoever waits for an answer to this would wait for ever: better the worker is lost, and said so.
                logger.exception("a message of worker %s", self.setup.device)
                self.kill(f"it sent what cannot be read ({type(error).__name__}: {error})")
                return

    def _read_output(self) -> None:
        """Show what has been printed: at most a chunk a turn, so that a flood of it does not stop everything else."""
        try:
            data = os.read(self._output.fileno(), _CHUNK)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._output.fileno())
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
