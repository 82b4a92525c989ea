"""Numbered instants of a process, at any of which a test can kill it; see `benchmarks/crash_points.py`.

Points are before each sync, renaming, removal and making of files and directories, each write to a spill file, each
begin and commit of a transaction, each message, and each start of a process. Nothing is installed, and nothing costs
anything, unless the environment has `VARIABLE`: a folder, and after colons the role and the number of the point where a
process kills itself, once for the folder.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra_tune.engine.channel import Channel

VARIABLE = "HYDRA_TUNE_CRASH_POINT"
CALLS = ("fsync", "replace", "rename", "unlink", "mkdir", "rmdir", "pwrite")
"""Functions of `os` that are points."""


def install(role: str) -> None:
    """Number the points of this process from now on, if the environment says so."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted:
        folder, _, target = wanted.partition(":")
        _Points(role, Path(folder), target).install()


class _Points:
    def __init__(self, role: str, folder: Path, target: str) -> None:
        self.role = role
        self.folder = folder
        self.target = target
        """Role and number of the point to be killed at; empty to count only."""
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._write, self._mkdir = os.pwrite, os.mkdir
        self._counter = os.open(folder / f"{role}-{os.getpid()}.count", os.O_RDWR | os.O_CREAT, 0o600)

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, self._before(getattr(os, name)))
        Channel.send = self._before(Channel.send)  # type: ignore[method-assign]
        subprocess.Popen.__init__ = self._before(subprocess.Popen.__init__)  # type: ignore[method-assign]
        if self.role == "coordinator":
            from sqlalchemy import Engine, event

            for name in ("begin", "commit"):
                event.listen(Engine, name, lambda _connection: self._reach())

    def _before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def reached(*args: Any, **options: Any) -> Any:
            self._reach()
            return call(*args, **options)

        return reached

    def _reach(self) -> None:
        with self._lock:
            number = next(self._numbers)
            self._write(self._counter, str(number).encode(), 0)
            if self.target != f"{self.role}:{number}":
                return
            try:
                self._mkdir(self.folder / "killed")
            except FileExistsError:  # a worker that took the place of the killed one goes on
                return
            os.kill(os.getpid(), signal.SIGKILL)
