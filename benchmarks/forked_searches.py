"""Runs the command line in processes forked from one that has imported it, so that a search costs no start-up.

Workers are forked from a template that all searches share, as in the tests. What a killed search leaves behind becomes
a child of this process or of the template, where `left` finds it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hydra_tune.engine.template_client import SHARED, shared_template

_PR_SET_CHILD_SUBREAPER = 36
_MODULES = (
    "hydra_tune.engine.crash_points", "hydra_tune.planner.survey", "hydra_tune.strategies.registry",
    "hydra_tune.strategies.shard.units", "hydra_tune.strategies.sparse.units", "hydra_tune.strategies.whole.units",
    "torch", "torch._dynamo",
)  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    code: int | None
    """Exit code, or minus the signal; None if it did not end in time and was killed."""
    said: str


class Searches:
    """Runs commands one after another; use as a context."""

    def __init__(self) -> None:
        self._open = ExitStack()
        self._template = 0

    def __enter__(self) -> Searches:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        path = os.environ.get(SHARED, "")
        if not path:
            path = os.path.join(self._open.enter_context(tempfile.TemporaryDirectory()), "template")
            self._open.enter_context(shared_template(path, _MODULES))
            os.environ[SHARED] = path
        self._template = _owner(path)
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def run(self, folder: Path, words: Sequence[str], environment: dict[str, str], seconds: float = 180.0) -> Ended:
        """Run `hydra-tune WORDS` in a folder."""
        said = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - closed below
        pid = os.fork()
        if pid == 0:
            _become(folder, words, environment, said.fileno())
        ending = os.pidfd_open(pid)
        try:
            ended = bool(select.select([ending], [], [], seconds)[0])
            if not ended:
                os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        finally:
            os.close(ending)
        with said:
            said.seek(0)
            text = said.read().decode(errors="replace")
        return Ended(os.waitstatus_to_exitcode(status) if ended else None, text)

    def run_and_import(self, folder: Path, words: Sequence[str], environment: dict[str, str]) -> Ended:
        """Run a command, then import the modules that it imported, so that later ones find them imported."""
        list_of_modules = folder / "modules"
        ended = self.run(folder, words, {**environment, "LIST_MODULES": str(list_of_modules)}, seconds=300.0)
        for name in list_of_modules.read_text().splitlines():
            if name != "__mp_main__":
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
        assert len(os.listdir("/proc/self/task")) == 1, "a fork would lose the threads of an import"
        return ended

    def left(self, seconds: float = 10.0) -> list[int]:
        """Return the processes that searches left behind and that do not end by themselves in time; kill them."""
        end = time.monotonic() + seconds
        while (alive := list(self._alive())) and time.monotonic() < end:
            time.sleep(0.01)
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return alive

    def _alive(self) -> Iterator[int]:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)[0]) and ended != self._template:
                continue
        for parent in (os.getpid(), self._template):
            children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
            yield from (int(pid) for pid in children if int(pid) != self._template)


def _become(folder: Path, words: Sequence[str], environment: dict[str, str], output: int) -> None:
    """Run the command in this forked process, and end it."""
    code = 70
    try:
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        os.environ.update(environment)
        sys.argv[:] = ["hydra-tune", *words]
        from hydra_tune.cli.app import main

        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - shown as an interpreter shows it
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        if "LIST_MODULES" in environment:
            Path(environment["LIST_MODULES"]).write_text("\n".join(sys.modules))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _owner(path: str) -> int:
    """Return the process that listens at a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(path)
        found = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", found)[0]
    return pid
