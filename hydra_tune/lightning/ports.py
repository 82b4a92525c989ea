"""What the callback says to its trial, and asks of it, wherever the two are.

A trial is an Optuna trial of any storage, or a `RemoteTrial` in a worker of a search, which can do more: it keeps all
metrics, knows a place for checkpoints and whether the search is being stopped. `ddp_spawn` trains in processes of its
own; there a `LinkedPort` speaks for the trial over a socket, and a thread here answers. So no storage has to be reached
from another process.
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

from hydra_tune.lightning.verdicts import Verdict
from hydra_tune.remote_trial import RemoteTrial


class Port(Protocol):
    """The callback's side of a trial."""

    checkpoints: Path | None
    """Where checkpoints go; None where there is no place for them."""
    checkpoint_seconds: float

    def params(self) -> dict[str, Any]: ...

    def report(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Record these metrics, the first of them as the trial's; returns whether the trial is to be pruned."""

    def describe(self, facts: Mapping[str, Any]) -> None:
        """What was measured of the training."""

    def checkpointed(self, step: int, size: int, seconds: float) -> None: ...

    def note(self, message: str) -> None: ...

    def stopping(self) -> bool:
        """A sign of life; returns whether the search is being stopped."""

    def ended(self, verdict: Verdict) -> None:
        """Training ends so, in whichever process."""


_begun: weakref.WeakKeyDictionary[BaseTrial, tuple[int, int]] = weakref.WeakKeyDictionary()
"""The fits that a trial has begun, and its reports: an objective may have several, as for cross-validation."""


class TrialPort:
    """A trial in this process."""

    checkpoint_seconds = 10.0

    def __init__(self, trial: BaseTrial) -> None:
        self.trial = trial
        self.verdict: Verdict | None = None
        """What other processes of this training have ended with."""
        self.checkpoints: Path | None = None
        self._before = 0
        """Reports of earlier fits."""
        self.remote = trial if isinstance(trial, RemoteTrial) else None
        if self.remote is not None:
            self.checkpoints, self.checkpoint_seconds = self.remote.checkpoints, self.remote.checkpoint_seconds

    def params(self) -> dict[str, Any]:
        return dict(self.trial.params)

    def begin_fit(self) -> int:
        """The number of the fit that begins, from 0; its reports go on after those of the fits before it."""
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

    def ended(self, verdict: Verdict) -> None:
        self.verdict = verdict


class LinkedPort:
    """A trial in the process that started this one; connects when it is first used, which only rank 0 does."""

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
        return self._call("params")  # type: ignore[no-any-return]

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

    def ended(self, verdict: Verdict) -> None:
        self._call("ended", verdict)


CALLS = frozenset({"params", "report", "describe", "checkpointed", "note", "stopping", "ended"})


class PortServer:
    """Answers rank 0 of the processes that this one starts, until that has hung up."""

    def __init__(self, port: TrialPort) -> None:
        self.port = port
        # Only its owner can reach into the directory, so whoever connects is one of ours.
        folder = tempfile.TemporaryDirectory(prefix="hydra-tune-port-")
        self._address = f"{folder.name}/trial"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._address)
        listener.listen()
        self._thread = threading.Thread(
            target=_serve, args=(port, listener, folder), name="hydra-port", daemon=True
        )  # fmt: skip
        self._thread.start()
        # Wakes the thread where nobody has called.
        self.close = weakref.finalize(self, _hang_up, listener)

    @property
    def serving(self) -> bool:
        return self._thread.is_alive()

    def linked(self) -> LinkedPort:
        """What a process that this one starts is given instead of the port."""
        return LinkedPort(self._address, self.port.checkpoints, self.port.checkpoint_seconds)


def _hang_up(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended already
        listener.shutdown(socket.SHUT_RDWR)


def _serve(port: TrialPort, listener: socket.socket, folder: tempfile.TemporaryDirectory[str]) -> None:
    with folder, listener:
        try:
            caller, _ = listener.accept()
        except OSError:  # hung up
            return
        with Connection(caller.detach()) as line:
            while True:
                try:
                    name, args = line.recv()
                except (EOFError, ConnectionResetError):
                    return
                line.send(_answer(port, name, args))


def _answer(port: TrialPort, name: str, args: tuple[Any, ...]) -> tuple[Any, Exception | None]:
    try:
        if name not in CALLS:
            raise ValueError(f"a trial has no {name!r}")
        return getattr(port, name)(*args), None
    except Exception as error:  # noqa: BLE001 - raised where it was called
        return None, error
