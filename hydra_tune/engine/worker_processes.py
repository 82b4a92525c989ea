"""Makes an engine's worker processes, from a template on this machine with the reaper that outlives it.

A simulation puts its own in place of it (`benchmarks/simulation`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hydra_tune.engine.messages import Setup
from hydra_tune.engine.process import WorkerProcess
from hydra_tune.engine.reaper import Reaper
from hydra_tune.engine.template_client import TemplateClient


class Process(Protocol):
    """The coordinator's side of a worker process, as the pool and the engine use it; see `WorkerProcess`."""

    tail: deque[str]
    """Last lines that the worker printed."""

    @property
    def pid(self) -> int: ...

    def start(self) -> None: ...

    def send(self, message: object) -> None: ...

    def kill(self, because: str = "") -> None: ...

    async def closed(self) -> None: ...

    async def dump_stacks(self) -> str: ...

    async def reap(self) -> str: ...


class Processes(Protocol):
    """A source of worker processes."""

    def make(self, setup: Setup, on_message: Callable[[Any], None], on_line: Callable[[str], None]) -> Process:
        """Return a worker process that is not started yet."""
        ...

    def warm(self, modules: Sequence[str]) -> None:
        """Import these modules ahead for processes that start from now on."""
        ...

    def abandon(self) -> None:
        """Start no more processes; running ones are still collected."""
        ...

    def close(self) -> None:
        """End; no process remains."""
        ...


class LocalProcesses:
    """Worker processes of this machine, forked from a template."""

    def __init__(self, modules: Sequence[str]) -> None:
        """Start the template, which imports `modules`, and the reaper."""
        self._reaper = Reaper()
        try:
            self.launcher = TemplateClient(self._reaper, modules)
        except BaseException:
            self._reaper.close()
            raise

    def make(self, setup: Setup, on_message: Callable[[Any], None], on_line: Callable[[str], None]) -> Process:
        return WorkerProcess(setup, self.launcher, self._reaper, on_message, on_line)

    def warm(self, modules: Sequence[str]) -> None:
        self.launcher.warm(modules)

    def abandon(self) -> None:
        self.launcher.abandon()

    def close(self) -> None:
        try:
            self.launcher.close()
        finally:
            self._reaper.close()
