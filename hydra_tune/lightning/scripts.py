"""Trials in a user's script that trains with strategy `ddp`, which runs the script again for each further rank.

Each rank would ask its own study and train with its own parameters. Here only rank 0 has a study; the other ranks get a
trial with the suggestions of rank 0's trial, over a socket whose address is in their environment.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import optuna
from optuna.trial import FixedTrial, TrialState

from hydra_tune.core.errors import InputError

T = TypeVar("T")
ADDRESS = "HYDRA_TUNE_TRIALS"
Objective = Callable[[Any], float | Sequence[float]]


def optimize_ddp(
    study: optuna.Study | Callable[[], optuna.Study], objective: Objective, *, n_trials: int
) -> optuna.Study | None:
    """Run trials whose Trainers use strategy `ddp`; return the study on rank 0, None on the others.

    `study` is best given as a function that makes it, which only rank 0 calls. Start the script once, with plain
    `python`; Lightning starts the other ranks.
    """
    if int(os.environ.get("LOCAL_RANK", 0)) > 0:
        _follow(objective, n_trials)
        return None
    made = study() if callable(study) else study
    with _Announcer() as announcer:
        for number in range(n_trials):
            _run(made, made.ask(), objective, announcer, number)
    return made


def _run(study: optuna.Study, asked: optuna.Trial, objective: Objective, announcer: _Announcer, number: int) -> None:
    trial = _Announced(study, asked._trial_id)
    trial.announcer = announcer
    announcer.begins(number, trial)
    try:
        values = objective(trial)
    except optuna.TrialPruned:
        study.tell(trial, state=TrialState.PRUNED)
    except BaseException:
        study.tell(trial, state=TrialState.FAIL)
        raise
    else:
        study.tell(trial, values)


class _Announced(optuna.Trial):
    """Rank 0's trial, which announces its suggestions to other ranks."""

    announcer: _Announcer

    def suggest_float(self, *args: Any, **options: Any) -> float:
        return self.announcer.changed(super().suggest_float(*args, **options))

    def suggest_int(self, *args: Any, **options: Any) -> int:
        return self.announcer.changed(super().suggest_int(*args, **options))

    def suggest_categorical(self, *args: Any, **options: Any) -> Any:
        return self.announcer.changed(super().suggest_categorical(*args, **options))


class _Announcer:
    """Rank 0's end of the socket: the running trial and its suggestions so far."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._number = -1
        self._trial: optuna.Trial | None = None

    def __enter__(self) -> _Announcer:
        self._folder = tempfile.TemporaryDirectory(prefix="hydra-tune-trials-")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{self._folder.name}/trials")
        self._listener.listen()
        os.environ[ADDRESS] = f"{self._folder.name}/trials"
        self._thread = threading.Thread(target=self._accept, name="hydra-trials", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.begins(sys.maxsize, None)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self._folder.cleanup()
        del os.environ[ADDRESS]

    def begins(self, number: int, trial: optuna.Trial | None) -> None:
        with self._news:
            self._number, self._trial = number, trial
            self._news.notify_all()

    def changed(self, value: T) -> T:
        with self._news:
            self._news.notify_all()
        return value

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:  # the last trial is done
                return
            line = Connection(caller.detach())
            threading.Thread(target=self._answer, args=(line,), name="hydra-trials-rank", daemon=True).start()

    def _answer(self, line: Connection) -> None:
        with line:
            while True:
                try:
                    asked = line.recv()
                except EOFError:
                    return
                line.send(self._number if asked is None else self._suggested(*asked))

    def _suggested(self, number: int, name: str) -> tuple[bool, Any]:
        """Wait for a parameter of trial `number`; return True and its value, or False if the trial ended without it."""
        with self._news:
            self._news.wait_for(lambda: self._number > number or (self._number == number and name in self._params()))
            return (True, self._params()[name]) if self._number == number else (False, None)

    def _params(self) -> Mapping[str, Any]:
        return {} if self._trial is None else self._trial.params


def _follow(objective: Objective, n_trials: int) -> None:
    """Run the same objective on another rank, with rank 0's parameters."""
    if ADDRESS not in os.environ:
        raise InputError("this rank does not know rank 0's trials", "start the script with python, not with torchrun")
    caller = socket.socket(socket.AF_UNIX)
    caller.connect(os.environ[ADDRESS])
    with Connection(caller.detach()) as line:
        # The first trials may have run without ddp, before this rank existed.
        line.send(None)
        for number in range(line.recv(), n_trials):
            with contextlib.suppress(optuna.TrialPruned):
                objective(FixedTrial(_Followed(line, number), number=number))


class _Followed(dict[str, Any]):
    """The parameters of rank 0's trial, each requested on lookup."""

    def __init__(self, line: Connection, number: int) -> None:
        super().__init__()
        self._line, self._number = line, number

    def __contains__(self, name: object) -> bool:
        if not super().__contains__(name):
            self._line.send((self._number, name))
            known, value = self._line.recv()
            if not known:
                raise InputError(f"rank 0's trial {self._number} has no {name!r}", "suggest the same on all ranks")
            self[str(name)] = value
        return True
