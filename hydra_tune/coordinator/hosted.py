"""The study that samplers and callbacks see in the coordinator, and the calls of workers on its storage."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import cloudpickle
import optuna
from optuna.trial import FrozenTrial

from hydra_tune.storage import HydraStorage
from hydra_tune.training.remote_study import METHODS

Callback = Callable[[optuna.Study, FrozenTrial], None]

_NEVER = frozenset({"create_new_study", "delete_study"})


class HostedStudy(optuna.Study):
    """The study of a running search: `stop` ends the search, and `optimize` is refused as within an objective."""

    @property
    def asked_to_stop(self) -> bool:
        """True once a sampler, a callback or an objective has called `stop`."""
        return self._stop_flag

    def stop(self) -> None:
        """Begin no more trials."""
        self._stop_flag = True

    def optimize(self, *args: Any, **options: Any) -> NoReturn:
        """Refuse: the search itself runs the study's trials."""
        raise RuntimeError("Nested invocation of `Study.optimize` method isn't allowed.")

    def call_back(self, callbacks: Sequence[Callback], trial_id: int) -> None:
        """Call each callback with the study and the trial that has ended, as `optimize` does."""
        for callback in callbacks:
            callback(self, copy.deepcopy(self._storage.get_trial(trial_id)))

    def part(self, name: str) -> bytes:
        """Return the sampler or the pruner for a worker, pickled."""
        return bytes(cloudpickle.dumps({"sampler": self.sampler, "pruner": self.pruner}[name]))


def call_storage(
    storage: HydraStorage, study_id: int, method: str, args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """Call a method of the storage for a worker; raise a ValueError for one that changes another study."""
    if method not in METHODS or method in _NEVER:
        raise ValueError(f"a trial's storage has no {method!r}: open the database by its URL for that")
    if method.startswith(("set_", "create_")):
        first = args[0] if args else next(iter(options.values()))
        if not _belongs(storage, study_id, first, of_trial=method.startswith("set_trial")):
            raise ValueError(f"{method} would change another study: open the database by its URL for that")
    if method == "get_all_trials":
        options["deepcopy"] = False  # it is copied on its way to the worker
    return getattr(storage, method)(*args, **options)


def _belongs(storage: HydraStorage, study_id: int, id: int, *, of_trial: bool) -> bool:
    if not of_trial:
        return id == study_id
    trial = storage.get_trial(id)
    try:
        ours = storage.get_trial_id_from_study_id_trial_number(study_id, trial.number)
    except KeyError:
        return False
    return ours == trial._trial_id
