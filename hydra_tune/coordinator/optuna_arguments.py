"""Arguments of Optuna's `create_study` and `optimize` as arguments of a search: names, values and storage objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import optuna
from optuna.storages import BaseStorage, RDBStorage
from optuna.study import StudyDirection

from hydra_tune.core.errors import SpecError, quoted
from hydra_tune.storage import HydraStorage
from hydra_tune.storage.database import address


class OptunaArguments(TypedDict, total=False):
    """Arguments to which Optuna gives another name than a search does; both names are accepted."""

    study_name: str | None
    """The name of the study: `study`."""
    directions: Sequence[str | StudyDirection] | None
    """The directions of several objectives: `direction`."""
    n_jobs: int
    """Trials in flight: `concurrency`; -1 is the default."""
    show_progress_bar: bool
    """Show progress: `progress`."""
    gc_after_trial: bool
    """Refused if true: trials run in other processes."""


def translated(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a search by their own names and as plain values."""
    found = dict(given)
    for theirs, ours in (("study_name", "study"), ("show_progress_bar", "progress")):
        if theirs in found:
            _rename(found, theirs, ours)
    if found.get("directions") is not None:
        if found.get("direction") not in (None, "minimize"):
            raise SpecError("direction and directions are both given", "give one of them")
        found["direction"] = list(found["directions"])
    found.pop("directions", None)
    if "direction" in found:
        found["direction"] = _directions(found["direction"])
    if "n_jobs" in found:
        jobs = found.pop("n_jobs")
        found["concurrency"] = found.get("concurrency") or (None if jobs == -1 else jobs)
    if found.pop("gc_after_trial", False):
        raise SpecError(
            "gc_after_trial cannot be done: trials run in other processes", "call gc.collect() in the objective"
        )
    if isinstance(found.get("storage"), BaseStorage):
        found["storage"] = _url(found["storage"])
    return found


def _rename(found: dict[str, Any], theirs: str, ours: str) -> None:
    value = found.pop(theirs)
    if ours == "study" and value is not None and found.get(ours) not in (None, value):
        raise SpecError(f"{theirs} and {ours} are both given", "give one of them")
    if value is not None:
        found[ours] = value


def _directions(direction: Any) -> Any:
    """Return a direction, or a list of them, as text."""
    if isinstance(direction, StudyDirection):
        return direction.name.lower()
    if isinstance(direction, list | tuple):
        return [_directions(each) for each in direction]
    return direction


def _url(storage: BaseStorage) -> str:
    """Return the URL of a storage object's database."""
    if isinstance(storage, HydraStorage):
        return storage.url
    backend = getattr(storage, "_backend", storage)
    if isinstance(backend, RDBStorage):
        return address(backend.engine)
    kind = type(backend).__name__
    lacks = (
        "is gone with this process" if isinstance(backend, optuna.storages.InMemoryStorage) else "is no SQL database"
    )
    raise SpecError(
        f"storage cannot be {quoted(kind)}, which {lacks}: a search also records attempts, leases and checkpoints",
        "give a URL such as sqlite:///x.db, and copy the study with optuna.copy_study afterwards",
    )
