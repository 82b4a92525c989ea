"""Numbered instants of a process, at any of which a test can kill it or raise an error.

`benchmarks/crash_points.py` does so. Points are before each sync, renaming, removal and making of files and
directories, each opening of a file to write, each write to a spill file, each begin and commit of a transaction, each
message, and each start of a process. Nothing is installed, and nothing costs anything, unless the environment has
`VARIABLE`: a folder, and after colons the role and the number of the point, and the number of the error to raise there.
Without an error the process kills itself. Either happens once for a folder.
"""

from __future__ import annotations

import builtins
import errno
import io
import itertools
import os
import signal
import socket
import sqlite3
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra_tune.engine.channel import Channel
from hydra_tune.engine.reaper import Reaper

VARIABLE = "HYDRA_TUNE_CRASH_POINT"
HAPPENED = "happened"
"""File in the folder that names the point that was reached, and the error."""
CALLS = ("fsync", "replace", "rename", "unlink", "mkdir", "rmdir", "pwrite")
"""Functions of `os` that are points."""

_MEMORY = MemoryError("injected: out of memory")
_DISK = (
    OSError(errno.ENOSPC, "injected: no space left on device"), OSError(errno.EIO, "injected: input/output error"),
    OSError(errno.EMFILE, "injected: too many open files"), _MEMORY,
)  # fmt: skip
_START = (OSError(errno.EMFILE, "injected: too many open files"), OSError(errno.ENOMEM, "injected: no memory"), _MEMORY)
_DATABASE = ("injected: disk I/O error", "injected: database or disk is full", "injected: database is locked")


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
        point, _, error = target.rpartition(":") if target.count(":") == 2 else (target, "", "")
        self.target = point
        """Role and number of the point; empty to count only."""
        self.error = int(error) if error else None
        """Number of the error to raise, modulo the number of errors of the point's kind; None to kill."""
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._write, self._open = os.pwrite, os.open
        self._counter = os.open(folder / f"{role}-{os.getpid()}.count", os.O_RDWR | os.O_CREAT, 0o600)

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, self._before(getattr(os, name), name, _DISK))
        opening = self._before_opening(open)
        # By `setattr`, as a type checker takes an assignment to a method for a mistake.
        for module in (builtins, io):
            setattr(module, "open", opening)  # noqa: B010
        for owner, name, errors in (
            (Channel, "send", (_MEMORY,)), (Reaper, "_say", (_MEMORY,)),
            (subprocess.Popen, "__init__", _START), (socket, "send_fds", _START),
        ):  # fmt: skip
            setattr(owner, name, self._before(getattr(owner, name), f"{owner.__name__}.{name}", errors))
        if self.role == "coordinator":
            from sqlalchemy import Engine, event
            from sqlalchemy.exc import OperationalError

            texts = [OperationalError(None, None, sqlite3.OperationalError(text)) for text in _DATABASE]
            for name in ("begin", "commit"):
                event.listen(Engine, name, self._before(lambda _connection: None, name, (*texts, _MEMORY)))

    def _before(self, call: Callable[..., Any], name: str, errors: tuple[Exception, ...]) -> Callable[..., Any]:
        def reached(*args: Any, **options: Any) -> Any:
            self._reach(name, errors)
            return call(*args, **options)

        return reached

    def _before_opening(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def reached(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if not set(mode).isdisjoint("wax+") and not isinstance(file, int):
                self._reach("open", _DISK)
            return call(file, mode, *args, **options)

        return reached

    def _reach(self, name: str, errors: tuple[Exception, ...]) -> None:
        with self._lock:
            number = next(self._numbers)
            self._write(self._counter, str(number).encode(), 0)
            if self.target != f"{self.role}:{number}":
                return
            error = None if self.error is None else errors[self.error % len(errors)]
            try:
                happened = self._open(self.folder / HAPPENED, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:  # a worker that took the place of the killed one goes on
                return
            self._write(happened, f"{name}: {'killed' if error is None else error}".encode(), 0)
            os.close(happened)
            if error is None:
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                raise error
