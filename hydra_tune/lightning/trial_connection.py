"""The callback's connection to its trial, in the same process or another.

A trial is an Optuna trial of any storage, or a `RemoteTrial` in a worker of a search, which also stores all metrics,
has a directory for checkpoints and knows whether the search is being stopped. `ddp_spawn` trains in processes of its
own; there a `SocketConnection` forwards calls over a socket to a thread in this process, so that other processes need
no access to the storage.
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from optuna.trial import BaseTrial

from hydra_tune.lightning.end_reasons import EndReason
from hydra_tune.training.remote_trial import RemoteTrial


class TrialConnection(Protocol):
    """The callback's interface to a trial."""

    checkpoints: Path | None
    """Directory for checkpoints, or None."""
    checkpoint_seconds: float

    def params(self) -> dict[str, Any]: ...

    def report(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Record these metrics, the first as the trial's value; True if the trial should be pruned."""

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Record measurements of the training."""

    def checkpointed(self, step: int, size: int, seconds: float) -> None: ...

    def note(self, message: str) -> None: ...

    def stopping(self) -> bool:
        """Send a sign of life; True if the search is being stopped."""

    def ended(self, verdict: EndReason) -> None:
        """Record how training ended, in any process."""


_begun: weakref.WeakKeyDictionary[BaseTrial, tuple[int, int]] = weakref.WeakKeyDictionary()
"""Number of fits and reports of each trial: an objective may run several fits, as in cross-validation."""


class DirectConnection:
    """A trial in this process."""

    checkpoint_seconds = 10.0

    def __init__(self, trial: BaseTrial) -> None:
        self.trial = trial
        self.verdict: EndReason | None = None
        """Verdict with which other processes of this training ended."""
        self.checkpoints: Path | None = None
        self._before = 0
        """Reports of earlier fits."""
        self.remote = trial if isinstance(trial, RemoteTrial) else None
        if self.remote is not None:
            self.checkpoints, self.checkpoint_seconds = self.remote.checkpoints, self.remote.checkpoint_seconds

    def params(self) -> dict[str, Any]:
        return dict(self.trial.params)

    def begin_fit(self) -> int:
        """Return the number of the fit that begins, from 0; its reports continue after those of earlier fits."""
        self.verdict = None
        fits, self._before = _begun.get(self.trial, (0, 0))
        _begun[self.trial] = fits + 1, self._before
        return fits

    def report(self, step: int, metrics: Mapping[str, float]) -> bool:
        step += self._before
        fits, reports = _begun[self.trial]
        _begun[self.trial] = fits, max(reports, step + 1)
        name, *others = metrics
        if self.remote is not None:
            self.remote.metrics(step, dict(metrics))
        else:
            for other in others:
                self.trial.set_user_attr(other, metrics[other])
        if self._objectives() > 1:
            return False  # Optuna prunes by one objective only
        self.trial.report(metrics[name], step)
        return self.trial.should_prune()

    def _objectives(self) -> int:
        if self.remote is not None:
            return self.remote.objectives
        study = getattr(self.trial, "study", None)
        return 1 if study is None else len(study.directions)

    def describe(self, facts: Mapping[str, Any]) -> None:
        self.trial.set_user_attr("lightning", dict(facts))
        if self.remote is not None and facts.get("peak_bytes") is not None:
            self.remote.peak(facts["peak_bytes"])

    def checkpointed(self, step: int, size: int, seconds: float) -> None:
        if self.remote is not None:
            self.remote.checkpointed(step, size, seconds)

    def note(self, message: str) -> None:
        if self.remote is not None:
            self.remote.note("checkpoint", message)

    def stopping(self) -> bool:
        return self.remote is not None and self.remote.stopping()

    def ended(self, verdict: EndReason) -> None:
        self.verdict = verdict


class SocketConnection:
    """A trial in the parent process; connects on first use, which happens on rank 0 only."""

    def __init__(self, address: str, checkpoints: Path | None, checkpoint_seconds: float) -> None:
        self.address, self.checkpoints, self.checkpoint_seconds = address, checkpoints, checkpoint_seconds
        self._line: Connection | None = None

    def _call(self, name: str, *args: Any) -> Any:
        if self._line is None:
            caller = socket.socket(socket.AF_UNIX)
            caller.connect(self.address)
            self._line = Connection(caller.detach())
        self._line.send((name, args))
        value, error = self._line.recv()
        if error is not None:
            raise error
        return value

    def params(self) -> dict[str, Any]:
        params: dict[str, Any] = self._call("params")
        return params

    def report(self, step: int, metrics: Mapping[str, float]) -> bool:
        return bool(self._call("report", step, dict(metrics)))

    def describe(self, facts: Mapping[str, Any]) -> None:
        self._call("describe", dict(facts))

    def checkpointed(self, step: int, size: int, seconds: float) -> None:
        self._call("checkpointed", step, size, seconds)

    def note(self, message: str) -> None:
        self._call("note", message)

    def stopping(self) -> bool:
        return bool(self._call("stopping"))

    def ended(self, verdict: EndReason) -> None:
        self._call("ended", verdict)


CALLS = frozenset({"params", "report", "describe", "checkpointed", "note", "stopping", "ended"})


class ConnectionServer:
    """Answers rank 0 of the processes that this one starts, until rank 0 disconnects."""

    def __init__(self, port: DirectConnection) -> None:
        self.port = port
        # Only its owner can access the directory, so any client is one of our processes.
        folder = tempfile.TemporaryDirectory(prefix="hydra-tune-port-")
        self._address = f"{folder.name}/trial"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._address)
        listener.listen()
        self._thread = threading.Thread(
            target=_serve, args=(port, listener, folder), name="hydra-port", daemon=True
        )  # fmt: skip
        self._thread.start()
        # Wakes the thread if no process has connected.
        self.close = weakref.finalize(self, _hang_up, listener)

    @property
    def serving(self) -> bool:
        return self._thread.is_alive()

    def linked(self) -> SocketConnection:
        """Return the port for a process that this one starts."""
        return SocketConnection(self._address, self.port.checkpoints, self.port.checkpoint_seconds)


def _hang_up(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # already closed
        listener.shutdown(socket.SHUT_RDWR)


def _serve(port: DirectConnection, listener: socket.socket, folder: tempfile.TemporaryDirectory[str]) -> None:
    with folder, listener:
        try:
            caller, _ = listener.accept()
        except OSError:  # closed
            return
        with Connection(caller.detach()) as line:
            while True:
                try:
                    name, args = line.recv()
                except (EOFError, ConnectionResetError):
                    return
                line.send(_answer(port, name, args))


def _answer(port: DirectConnection, name: str, args: tuple[Any, ...]) -> tuple[Any, Exception | None]:
    try:
        if name not in CALLS:
            raise ValueError(f"a trial has no {name!r}")
        return getattr(port, name)(*args), None
    except Exception as error:  # noqa: BLE001 - raised where it was called
        return None, error
