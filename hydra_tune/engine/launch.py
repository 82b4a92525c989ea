"""Starts a worker process as a new interpreter, and defines the environment of every worker.

Forking a worker from a process that has finished its imports is faster (`template_client`); this is the fallback.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MEMORY_SETTINGS = {
    "MALLOC_ARENA_MAX": "1",
    "THP_MEM_ALLOC_ENABLE": "1",
    "MALLOC_MMAP_THRESHOLD_": str(16 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(64 * 2**20),
}
"""Settings that make a worker's glibc return freed memory; the user's own settings override them.

By default glibc keeps freed blocks of up to 32 MiB in one heap per thread: a sharded training exceeded a budget of 256
MiB by 600 MiB. Returning everything at once needs new pages for every tensor, which took a quarter of the time. One
heap that keeps blocks of up to 16 MiB stays within the budget's tolerance and is as fast as keeping all. Tensors of 2
MiB and more use huge pages: a third of the kernel time was page faults of small pages.
"""


def worker_environment(threads: int) -> dict[str, str]:
    """Return the environment variables of a worker that computes with `threads` threads."""
    environment = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        environment[name] = str(threads)
    # Gangs run on this machine; gloo would look up an interface by the host's name, which may not resolve.
    environment = MEMORY_SETTINGS | {"GLOO_SOCKET_IFNAME": "lo"} | environment
    environment["PYTHONUNBUFFERED"] = "1"
    # Keep the current folder off the path, where a user's queue.py would shadow Python's; the first message brings the
    # coordinator's path.
    environment["PYTHONSAFEPATH"] = "1"
    ours = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), ours)))
    return environment


@dataclass(frozen=True)
class Exit:
    """Exit status of a collected process."""

    code: int | None
    """Exit code, or minus the signal that killed the process; None if unknown."""
    peak_kib: int = 0
    """Peak memory in KiB by the kernel's count."""


@dataclass(frozen=True)
class Launched(ABC):
    """A worker process that was started and not yet collected."""

    pid: int
    inherited_kib: int
    """KiB at which the kernel's peak-memory count starts; only a larger peak is exact."""

    @abstractmethod
    async def collect(self) -> Exit:
        """Collect the ended process; until then its pid is not reused."""


class Launcher(ABC):
    """Starts worker processes."""

    @abstractmethod
    def launch(self, line: socket.socket, output: int, threads: int, then: Callable[[Launched | None], None]) -> None:
        """Start a worker that reads messages on `line` and prints to the descriptor `output`; both are closed here.

        `then` is called from the event loop with the running process, or with None if it could not be started.
        """


class Spawner(Launcher):
    """Starts each worker as a new interpreter."""

    def launch(self, line: socket.socket, output: int, threads: int, then: Callable[[Launched | None], None]) -> None:
        inherited = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        process = subprocess.Popen(
            [sys.executable, "-m", "hydra_tune.engine.worker", str(line.fileno())],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[line.fileno()],
            env=worker_environment(threads), start_new_session=True,
        )  # fmt: skip
        line.close()
        os.close(output)
        asyncio.get_running_loop().call_soon(then, _Spawned(process.pid, inherited, process))


@dataclass(frozen=True)
class _Spawned(Launched):
    process: subprocess.Popen[bytes]

    async def collect(self) -> Exit:
        try:
            _, status, usage = os.wait4(self.pid, 0)
        except ChildProcessError:  # the user's process ignores SIGCHLD
            self.process.returncode = 0
            return Exit(None)
        code = self.process.returncode = os.waitstatus_to_exitcode(status)
        return Exit(code, usage.ru_maxrss)
