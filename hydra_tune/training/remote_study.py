"""The study and the storage that user code in a worker reaches through its trial.

The study is Optuna's own class; its storage forwards each call to the storage of the coordinator, so whatever Optuna's
public functions do with a trial or a study works in a worker.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NoReturn

import optuna
from optuna.storages import BaseStorage, RDBStorage
from optuna.storages._cached_storage import _CachedStorage
from optuna.study import Study, StudyDirection

from hydra_tune.engine.messages import RemoteError
from hydra_tune.training.trial_line import Line

METHODS = frozenset(name for name, member in vars(BaseStorage).items() if callable(member) and not name.startswith("_"))
"""Methods of a storage that a worker may call; the coordinator refuses some of them for other studies."""


class _Forwarding:
    """Answers every method of a storage by asking the coordinator."""

    _line: Line

    def __init__(self, line: Line) -> None:
        self._line = line

    def get_heartbeat_interval(self) -> None:
        """Return None: the coordinator watches its workers itself."""

    def get_failed_trial_callback(self) -> None:
        """Return None: the coordinator retries trials itself."""

    def remove_session(self) -> None:
        """Do nothing: the connections are the coordinator's."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._line,)


def _forwarded(method: str) -> Callable[..., Any]:
    def call(self: _Forwarding, *args: Any, **options: Any) -> Any:
        options.pop("deepcopy", None)  # what arrives here is a copy already
        try:
            return self._line.ask("storage", method, args, options)
        except RemoteError as error:
            raise getattr(optuna.exceptions, error.kind, RuntimeError)(str(error)) from error

    return call


for _method in METHODS - vars(_Forwarding).keys():
    setattr(_Forwarding, _method, _forwarded(_method))


class _RemoteDatabase(_Forwarding, RDBStorage):
    """The coordinator's database, for libraries that look for an RDBStorage behind a study."""


class RemoteStorage(_Forwarding, _CachedStorage):
    """The coordinator's storage.

    It is of Optuna's class for databases, since libraries ask for that: the Lightning callback refuses `ddp_spawn` with
    any other storage. Nothing of that class is used.
    """

    def __init__(self, line: Line) -> None:
        super().__init__(line)
        self._backend = _RemoteDatabase(line)


class RemoteStudy(Study):
    """The study of a trial in a worker; `sampler` and `pruner` are copies of the coordinator's."""

    def __init__(self, study_id: int, name: str, directions: tuple[str, ...], line: Line) -> None:
        # The parent's `__init__` would read the database and make a sampler.
        self.__setstate__({
            "study_name": name, "_study_id": study_id, "_storage": RemoteStorage(line), "_line": line,
            "_directions": [StudyDirection[each.upper()] for each in directions], "_stop_flag": False,
        })  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        if name not in ("sampler", "pruner"):
            raise AttributeError(f"a study has no attribute {name!r}")
        part = pickle.loads(self._line.ask("part", name))
        setattr(self, name, part)
        return part

    def stop(self) -> None:
        """End the search after the trials that run now."""
        self._stop_flag = True
        self._line.ask("stop_study")

    def optimize(self, *args: Any, **options: Any) -> NoReturn:
        """Refuse, as Optuna does within an objective."""
        raise RuntimeError("Nested invocation of `Study.optimize` method isn't allowed.")
