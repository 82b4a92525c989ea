"""The line from a trial in a worker to the coordinator, and its extension to processes that user code starts.

Both kinds offer `ask`, which waits for an answer, and `tell`. A `WorkerLine` that is pickled, as `ddp_spawn` or joblib
do with a trial, becomes a `LinkedLine`: its calls go over a Unix socket to the worker, which hands them on.
"""

from __future__ import annotations

import os
import tempfile
import threading
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hydra_tune.engine.worker import WorkerContext

CALLS_AHEAD = 200
"""Calls that do not wait for an answer, after which one waits until the coordinator has worked through them."""
LONGEST_ADDRESS = 100
"""A Unix socket's path has at most this many bytes on every system."""


class Line(Protocol):
    """Calls to the coordinator on behalf of one trial."""

    def ask(self, name: str, *args: Any) -> Any:
        """Return the coordinator's answer; raise its error."""
        ...

    def tell(self, name: str, *args: Any) -> None:
        """Send a call that needs no answer."""
        ...


class WorkerLine:
    """The line of a trial in the worker itself."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._unit = context.unit
        """Unit of this trial: threads that outlive it must not act for the next trial."""
        self._told = 0
        self._server: LineServer | None = None

    def ask(self, name: str, *args: Any) -> Any:
        return self._context.ask(self._unit, name, *args)

    def tell(self, name: str, *args: Any) -> None:
        self._context.tell(self._unit, name, *args)
        self._told += 1
        if self._told % CALLS_AHEAD == 0:
            self.ask("caught_up")  # so that calls do not pile up in the coordinator's memory

    def peak(self, size: int) -> None:
        """Record the peak bytes of tensors in the unit."""
        self._context.unit_peak_bytes = max(self._context.unit_peak_bytes or 0, size)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._server is None:
            self._server = LineServer(self, self._context.setup.directory)
        return LinkedLine, (self._server.address, self._server.key)


class LinkedLine:
    """The line of a trial in another process that the worker's user code started; connects on first use."""

    def __init__(self, address: str, key: bytes) -> None:
        self._address, self._key = address, key
        self._connection: Connection | None = None
        self._pid = 0
        self._lock = threading.Lock()

    def ask(self, name: str, *args: Any) -> Any:
        with self._lock:
            if self._connection is None or self._pid != os.getpid():
                self._connection = Client(self._address, "AF_UNIX", authkey=self._key)
                self._pid = os.getpid()
            self._connection.send((name, args))
            value, error = self._connection.recv()
        if error is not None:
            raise error
        return value

    def tell(self, name: str, *args: Any) -> None:
        self.ask(name, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return LinkedLine, (self._address, self._key)


TOLD = frozenset({"report", "set_user_attr", "metrics", "checkpointed", "note"})
"""Calls that the coordinator does not answer."""


class LineServer:
    """Hands calls of other processes on to the coordinator, until the worker ends."""

    def __init__(self, line: WorkerLine, directory: str) -> None:
        self._line = line
        self.key = os.urandom(32)
        # Only its owner can enter either directory; that of the run is removed with the run.
        place = Path(directory) / f"line-{os.urandom(6).hex()}"
        if len(str(place)) > LONGEST_ADDRESS:
            place = Path(tempfile.mkdtemp(prefix="hydra-tune-")) / "line"
        self.address = str(place)
        self._listener = Listener(self.address, "AF_UNIX", authkey=self.key)
        threading.Thread(target=self._accept, name="hydra-line", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:  # a caller that gave up before it was accepted
                continue
            threading.Thread(target=self._serve, args=(connection,), name="hydra-line", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with connection:
            while True:
                try:
                    name, args = connection.recv()
                except (EOFError, OSError):
                    return
                connection.send(self._answer(name, args))

    def _answer(self, name: str, args: tuple[Any, ...]) -> tuple[Any, Exception | None]:
        try:
            if name in TOLD:
                self._line.tell(name, *args)
                return None, None
            return self._line.ask(name, *args), None
        except Exception as error:  # noqa: BLE001 - raised where it was called
            return None, error
