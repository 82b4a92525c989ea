"""The coordinator's side of the template: starts it, requests workers, replaces it when it dies.

If the platform has no safe `fork`, or if the template refuses, workers are spawned instead.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from hydra_tune.engine.launch import Exit, Launched, Launcher, Spawner, worker_environment
from hydra_tune.engine.reaper import Reaper
from hydra_tune.engine.template import PACKET, identity

logger = logging.getLogger(__name__)

SHARED = "HYDRA_TUNE_TEMPLATE"
"""Environment variable that names the socket of a template which several searches share."""
ANSWER_SECONDS = 30.0
"""Seconds after which a template that does not answer a fork or collect (milliseconds) is killed as hung."""
END_SECONDS = 5.0
"""Seconds that a template gets to end after its socket is closed; then it is killed."""
DEATHS = 2
"""Consecutive templates that may die without forking a worker; then workers are spawned instead."""


@dataclass(frozen=True)
class _Wanted:
    """A requested worker. `then` gets None if it will not be started."""

    line: socket.socket
    output: int
    threads: int
    then: Callable[[Launched | None], None]

    def close(self) -> None:
        self.line.close()
        os.close(self.output)


@dataclass(frozen=True)
class _Forked(Launched):
    client: TemplateClient
    template: socket.socket
    """Socket of the template that forked the worker, which alone can collect it."""

    async def collect(self) -> Exit:
        return await self.client.collect(self.pid, self.template)


class TemplateClient(Launcher):
    """Launches workers by forking them from a template process."""

    def __init__(self, reaper: Reaper, modules: Sequence[str]) -> None:
        """Start a template that imports `modules`, or join the one that the environment names."""
        self._reaper = reaper
        self._modules = list(modules)
        self._line: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        """The template process, if it is our own."""
        self._said: IO[bytes] | None = None
        """File with the template's output."""
        self._importing = 0
        """Number of unanswered import requests."""
        self._spawner: Spawner | None = None if sys.platform == "linux" else Spawner()
        self._next = 0
        self._wanted: dict[int, _Wanted] = {}
        """Requested workers without an answer, by request id."""
        self._collecting: dict[int, asyncio.Future[Exit]] = {}
        """Ended workers to be collected, by pid."""
        self._deaths = 0
        """Templates that have died since the last fork."""
        self._patience: asyncio.TimerHandle | None = None
        """Timeout for the next answer."""
        self._closing = False
        if self._spawner is None and not self._join(os.environ.get(SHARED)):
            self._start()

    @property
    def pid(self) -> int | None:
        """Process id of our own template; None if it is shared or there is none."""
        return None if self._process is None else self._process.pid

    def launch(self, line: socket.socket, output: int, threads: int, then: Callable[[Launched | None], None]) -> None:
        if self._spawner is not None:
            self._spawner.launch(line, output, threads, then)
            return
        self._next += 1
        self._wanted[self._next] = _Wanted(line, output, threads, then)
        self._ask_for(self._next)

    def warm(self, modules: Sequence[str]) -> None:
        """Make the template import more modules, for workers forked from now on."""
        new = [module for module in modules if module not in self._modules]
        self._modules += new
        if new and self._line is not None:
            self._import(new)

    async def collect(self, pid: int, template: socket.socket) -> Exit:
        """Let the template collect an ended worker; the exit code is None if that template is gone."""
        if self._line is not template:
            return Exit(None)
        answer: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._collecting[pid] = answer
        self._say({"do": "collect", "pid": pid})
        return await answer

    def abandon(self) -> None:
        """Start no more workers; running ones are still collected."""
        self._closing = True
        if self._line is not None:
            self._read()
        self._forget_wanted()
        self._wait_for_answers()

    def _forget_wanted(self) -> None:
        wanted, self._wanted = self._wanted, {}
        for each in wanted.values():
            each.close()
            each.then(None)

    def close(self) -> None:
        """End the template, or leave a shared one; none of its workers remains."""
        if self._process is not None and self._importing:
            self._process.kill()
        elif self._process is None and self._line is not None:
            _leave(self._line)
        self._disconnect()

    # Connections

    def _join(self, path: str | None) -> bool:
        """Use the template that listens at `path`; it may refuse later."""
        if not path:
            return False
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            line.connect(path)
        except OSError as error:
            line.close()
            logger.info("there is no template at %s (%s)", path, error)
            return False
        self._line = line
        self._say({"do": "hello", "identity": identity(worker_environment(1))})
        self._connect(line)
        return True

    def _start(self) -> None:
        line, process, self._said = start_template()
        self._process = process
        self._reaper.watch(process.pid)
        self._connect(line)

    def _connect(self, line: socket.socket) -> None:
        self._line = line
        asyncio.get_running_loop().add_reader(line.fileno(), self._read)
        self._import(self._modules)
        for id in self._wanted:
            self._ask_for(id)

    def _disconnect(self) -> None:
        """Close the connection to the template, which ends our own one."""
        if self._line is not None:
            asyncio.get_running_loop().remove_reader(self._line.fileno())
            self._line.close()
            self._line = None
        for answer in self._collecting.values():
            if not answer.done():
                answer.set_result(Exit(None))
        self._collecting.clear()
        self._importing = 0
        self._wait_for_answers()
        if self._process is not None:
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._reaper.forget(self._process.pid)
            self._process = None
        if self._said is not None:
            self._said.close()
            self._said = None

    # Messages

    def _import(self, modules: Sequence[str]) -> None:
        self._importing += 1
        self._say({"do": "import", "modules": list(modules)})

    def _ask_for(self, id: int) -> None:
        wanted = self._wanted[id]
        self._say({"do": "fork", "id": id}, wanted.line.fileno(), wanted.output)

    def _say(self, request: dict[str, Any], *descriptors: int) -> None:
        assert self._line is not None
        try:
            socket.send_fds(self._line, [json.dumps(request).encode()], descriptors)
        except ConnectionError:
            # The reader notices the closed socket too and starts another template.
            logger.debug("the template is gone")
        self._wait_for_answers()

    def _wait_for_answers(self) -> None:
        """Start the timeout for the next answer, if one is due; imports have no time limit."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        if self._line is not None and not self._importing and (self._wanted or self._collecting):
            seconds = END_SECONDS if self._closing else ANSWER_SECONDS
            self._patience = asyncio.get_running_loop().call_later(seconds, self._give_up, seconds)

    def _give_up(self, seconds: float) -> None:
        """Replace a template that does not answer: kill our own, or leave a shared one."""
        logger.warning("the template process has not answered for %.0f s and is given up", seconds)
        if self._process is not None:
            self._process.kill()
        self._replace()

    def _read(self) -> None:
        while self._line is not None:
            try:
                data = self._line.recv(PACKET, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self._replace()
                return
            self._on_reply(json.loads(data))
            self._wait_for_answers()

    def _on_reply(self, reply: dict[str, Any]) -> None:
        """Handle a reply of the template."""
        match reply:
            case {"imported": _}:
                self._importing -= 1
            case {"forked": id, "pid": pid, "inherited_kib": inherited}:
                self._deaths = 0
                wanted = self._wanted.pop(id, None)
                if wanted is not None:  # an abandoned worker finds its socket closed and ends
                    wanted.close()
                    assert self._line is not None
                    wanted.then(_Forked(pid, inherited, self, self._line))
            case {"collected": pid, "code": code, "peak_kib": peak}:
                self._collecting.pop(pid).set_result(Exit(code, peak))
            case {"unlike": differing}:
                logger.info("the shared template does not serve this search: it was started with another %s", differing)
                self._disconnect()
                self._start()
            case {"refused": id, "because": reason}:
                # Other workers may have been forked already: each request has its own answer.
                self._spawn_from_now_on(reason)
                refused = self._wanted.pop(id, None)
                if refused is not None:
                    self.launch(refused.line, refused.output, refused.threads, refused.then)

    def _replace(self) -> None:
        """Start another template after one has died.

        Its pending workers are not requested again: it may have forked one before it could reply, and two processes
        must not read one socket. The callers request them anew.
        """
        said = self._last_words()
        self._disconnect()
        self._deaths += 1
        self._forget_wanted()
        if self._closing:
            return
        if self._deaths < DEATHS:
            logger.info("the template process has ended; another is started. It last said: %s", said)
            self._start()
        else:
            self._spawn_from_now_on(f"it ended {DEATHS} times before it could fork; it last said: {said}")

    def _spawn_from_now_on(self, reason: str) -> None:
        """Spawn workers as new interpreters from now on; the template still collects forked ones."""
        logger.info("workers are started as new interpreters, as the template cannot serve: %s", reason)
        self._spawner = Spawner()

    def _last_words(self) -> str:
        if self._said is None:
            return ""
        self._said.seek(0)
        return self._said.read()[-2000:].decode(errors="replace").strip().replace("\n", " | ")


def _leave(line: socket.socket) -> None:
    """Wait until a shared template has ended the workers that it forked for us."""
    try:
        line.shutdown(socket.SHUT_WR)
        while line.recv(PACKET):
            pass
    except ConnectionError:
        logger.debug("the template is gone")


def start_template(path: str | None = None) -> tuple[socket.socket, subprocess.Popen[bytes], IO[bytes]]:
    """Start a template process; return its socket, the process, and the file with its output."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    said = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
    # One thread only: numpy's OpenBLAS starts its threads when it is loaded.
    environment = worker_environment(threads=1) | {"OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "hydra_tune.engine.template", str(theirs.fileno()), *([path] if path else [])],
        stdin=subprocess.DEVNULL, stdout=said, stderr=said, pass_fds=[theirs.fileno()], env=environment,
        start_new_session=True,
    )  # fmt: skip
    theirs.close()
    return ours, process, said


@contextmanager
def shared_template(path: str, modules: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Serve all searches whose environment names `path` from one template, as in a test run."""
    line, process, said = start_template(path)
    try:
        line.send(json.dumps({"do": "import", "modules": list(modules)}).encode())
        line.recv(PACKET)  # the template now listens and has finished its imports
        yield process
    finally:
        line.close()
        process.wait()
        said.close()
        if os.path.exists(path):
            os.unlink(path)
