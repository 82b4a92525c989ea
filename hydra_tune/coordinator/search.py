"""The function `search`, which users call, and `run_search` behind it: settings in, result out.

The run itself is a `Search` (`search_run.py`), which runs trials one by one through a `TrialLoop` (`trial_loop.py`).
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import optuna
from optuna.study import StudyDirection

from hydra_tune.coordinator.display import make_display
from hydra_tune.coordinator.files import check_files_directory
from hydra_tune.coordinator.interrupts import run_in_event_loop
from hydra_tune.coordinator.optuna_arguments import OptunaArguments
from hydra_tune.coordinator.result import SearchResult
from hydra_tune.coordinator.run_directories import run_directories
from hydra_tune.coordinator.sampling import draws_by_number, make_pruner, make_sampler
from hydra_tune.coordinator.search_run import Search
from hydra_tune.coordinator.settings import SearchSettings, make_settings
from hydra_tune.core.devices import Device, parse_devices
from hydra_tune.core.errors import SearchFailed, SpecError
from hydra_tune.planner.resolve import resolve
from hydra_tune.strategies.base import Strategy
from hydra_tune.training.source import Build, PickledSource, Source


def search(
    build: Build,
    *,
    trials: int | None = None,
    n_trials: int | None = None,
    metric: str | Sequence[str] | None = None,
    direction: str | StudyDirection | Sequence[str | StudyDirection] = "minimize",
    study: str | None = None,
    storage: str | optuna.storages.BaseStorage | None = None,
    devices: str = "auto",
    devices_per_trial: int = 1,
    device_memory: str | int | None = None,
    cluster: str | None = None,
    spill: str | None = None,
    strategy: str | Mapping[str, Any] | Sequence[Any] = "auto",
    sampler: str | Mapping[str, Any] | optuna.samplers.BaseSampler | None = "tpe",
    pruner: str | Mapping[str, Any] | optuna.pruners.BasePruner | None = None,
    seed: int | None = None,
    timeout: float | None = None,
    stop_at_timeout: bool = False,
    enqueue: Sequence[Mapping[str, Any]] = (),
    callbacks: Sequence[Callable[[optuna.Study, optuna.trial.FrozenTrial], None]] = (),
    catch: type[Exception] | tuple[type[Exception], ...] | None = None,
    resume: bool = False,
    load_if_exists: bool = False,
    concurrency: int | None = None,
    progress: bool = True,
    keep_weights: int = 10,
    checkpoint_seconds: float = 10.0,
    deadline: float | None = None,
    database_patience: float = 300.0,
    allow_changes: bool = False,
    **optuna_arguments: Unpack[OptunaArguments],
) -> SearchResult:
    """Search for the candidate with the best metric.

    `build(trial)` returns a `Candidate`, or a number like any Optuna objective. `trials` is the total of the study:
    resuming a study of 10 with `trials=20` runs 10 more; `n_trials`, as in Optuna, is how many to run now. After
    `timeout` seconds no trial is started; running trials are finished, or with `stop_at_timeout` end with the epochs
    they have. `enqueue` lists parameters to try first. Optuna's own names of arguments are accepted too.
    Raises SearchFailed if no trial completed.
    """
    given = dict(locals())  # only the arguments: no other local exists yet
    del given["build"]
    given |= given.pop("optuna_arguments")
    settings = make_settings(**given)
    return run_search(PickledSource.of(build), settings, space=getattr(build, "space", None), load_build=lambda: build)


def _check_cluster(settings: SearchSettings, strategy: Strategy) -> None:
    """Raise SpecError for settings that work on one machine only."""
    if settings.devices_per_trial > 1:
        one_machine = f"devices_per_trial={settings.devices_per_trial}"
    elif strategy.name == "pack":
        one_machine = "strategy pack"
    else:
        return
    raise SpecError(f"{one_machine} cannot be used with cluster", "leave one of them out")


def run_search(
    source: Source,
    settings: SearchSettings,
    *,
    space: Any = None,
    load_build: Callable[[], Build] | None = None,
    again: str = "",
) -> SearchResult:
    """Run a search whose settings are already checked; `again` is the command that resumes it."""
    # Check these before anything is created.
    check_files_directory(settings.storage)
    strategy = resolve(settings.strategy, budgeted=settings.device_memory is not None)
    devices: tuple[Device, ...] = ()
    if settings.cluster is not None:
        _check_cluster(settings, strategy)
    if settings.cluster is None:
        devices = parse_devices(settings.devices, settings.device_memory, settings.devices_per_trial)
        strategy.check(len(devices))
    later = settings.seed if draws_by_number(settings.sampler) else secrets.randbelow(2**31)
    sampler, pruner = make_sampler(settings.sampler, seed=later, space=space), make_pruner(settings.pruner)
    with run_directories(settings.spill) as directories, make_display(settings, devices) as display:
        whole_search = _kind(settings)(source, settings, devices, display, directories, space, again)
        run_in_event_loop(whole_search)
    result = SearchResult(settings.storage, settings.study, load_build or source.load, read_only=False,
                          sampler=sampler, pruner=pruner)  # fmt: skip
    if whole_search.interrupted:
        result.close()
        again = f"ht.search(..., study={settings.study!r}, resume=True)"
        raise KeyboardInterrupt(f"the search was interrupted; nothing is lost. Go on with {again}")
    if not result.completed:
        because = whole_search.failures.why_nothing_completed()
        failed = SearchFailed(f"no trial of study {settings.study!r} completed", because)
        failed.result = result
        raise failed
    return result


def _kind(settings: SearchSettings) -> type[Search]:
    """Return the class of search: on this machine, or on a cluster, of which nothing is imported otherwise."""
    if settings.cluster is None:
        return Search
    kind: type[Search] = importlib.import_module("hydra_tune.cluster.search").ClusterSearch
    return kind
