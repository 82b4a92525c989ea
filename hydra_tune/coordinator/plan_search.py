"""Plans a search without training: builds and surveys some candidates to choose and explain their strategies.

The candidates come from a separate study in a temporary database. Measurements are kept beside the search's own
database, so that the search need not repeat them.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from typing import Any

from hydra_tune.coordinator.display import Display
from hydra_tune.coordinator.files import files_directory
from hydra_tune.coordinator.interrupts import run_in_event_loop
from hydra_tune.coordinator.run_directories import run_directories
from hydra_tune.coordinator.search_run import Search
from hydra_tune.coordinator.spec import SearchSpec
from hydra_tune.core.devices import cores, parse_devices
from hydra_tune.core.errors import InputError, SearchFailed
from hydra_tune.core.states import Outcome
from hydra_tune.planner.admission import Room
from hydra_tune.planner.auto import Auto, why_none
from hydra_tune.planner.choice import Choice, Situation, choose
from hydra_tune.planner.rates import known_rates
from hydra_tune.planner.resolve import resolve
from hydra_tune.planner.search_time import SearchTime, search_time
from hydra_tune.storage import open_storage
from hydra_tune.storage.queries import trial_records
from hydra_tune.strategies.pool import Pool
from hydra_tune.strategies.registry import known


@dataclass(frozen=True)
class PlannedTrial:
    """One candidate and its survey."""

    number: int
    params: dict[str, Any]
    choice: Choice | None
    refused: str
    """Reason why no strategy can train the candidate, or why the survey failed."""


@dataclass(frozen=True)
class SearchPlan:
    """Some candidates of a search, and estimates for the whole search."""

    trials: tuple[PlannedTrial, ...]
    total: int
    now: SearchTime
    one_more_device: SearchTime
    twice_the_memory: SearchTime
    crowding: float


def plan_search(spec: SearchSpec, sample: int) -> SearchPlan:
    """Build and survey `sample` candidates of a search."""
    settings = spec.settings
    devices = parse_devices(settings.devices, settings.device_memory, settings.devices_per_trial)
    strategy = resolve(settings.strategy, budgeted=settings.device_memory is not None)
    strategy.check(len(devices))
    wanted = strategy.names if isinstance(strategy, Auto) else (strategy.name,)
    looking = Auto(among=tuple(kind() for kind in known().values()), apart=settings.device_memory is not None)
    with tempfile.TemporaryDirectory(prefix="hydra-tune-plan-") as folder, run_directories(settings.spill) as places:
        cpus = [device.memory for device in devices if device.torch_device == "cpu"]
        room = Room.here(places.paths, sum(cpus))
        pool = Pool.of(devices, host_bytes=room.host, disk_bytes=room.disk, cores=cores())
        pools = (pool, replace(pool, devices=pool.devices + 1), replace(pool, memory=2 * pool.memory))
        search = _PlanOnly(
            spec.source,
            replace(settings, trials=sample, storage=f"sqlite:///{folder}/plan.db", study="plan", pruner=None,
                    timeout=None, stop_at_timeout=False, resume=False, load_if_exists=False, n_trials=None,
                    callbacks=(), catch=None, progress=False, enqueue=settings.enqueue),
            devices, Display(settings, devices), places, spec.space, strategy=replace(looking, pools=pools),
            profiles=files_directory(settings.storage) / "profiles",
        )  # fmt: skip
        run_in_event_loop(search)
        if search.interrupted:
            raise KeyboardInterrupt("planning was interrupted")
        with open_storage(search.settings.storage, read_only=True) as opened:
            records = trial_records(opened, "plan")
    return _planned(search, records, pools, wanted, settings.trials)


class _PlanOnly(Search):
    """A search that ends each trial once it is planned."""

    def _note(self, outcome: Outcome) -> None:
        super()._note(outcome)
        if self.runner.attempts.objective_seen or outcome.values is not None:
            raise InputError(
                "build returned a number: an ordinary objective runs as it is, on one device",
                "return a Candidate to have its training planned",
            )


def _planned(
    search: Search, records: list[Any], pools: tuple[Pool, ...], wanted: tuple[str, ...], total: int
) -> SearchPlan:
    rates = known_rates()
    crowding = rates.crowding if rates is not None and pools[0].cpu and pools[0].devices > 1 else 1.0
    surveys = search.surveys
    usable = {number: found for number, found in sorted(surveys.items()) if found.estimates[0]}
    if not usable:
        reasons = [found.failed for found in surveys.values()] + [failure.error for failure in search.failures.outcomes]
        raise SearchFailed("no candidate could be planned", reasons[0] if reasons else "none was built")
    trials = []
    for record in records:
        found = surveys.get(record.number)
        if found is None or not found.estimates[0]:
            trials.append(PlannedTrial(record.number, record.params, None, found.failed if found else record.error))
            continue
        estimates = [e if e.refused else e.scaled(crowding) for e in found.estimates[0]]
        allowed = [e for e in estimates if e.strategy in wanted]
        choice = choose(allowed, Situation(pools[0], min(total, pools[0].devices + 1), found.epochs, total))
        shown = None if choice is None else replace(choice, options=tuple(estimates))
        trials.append(PlannedTrial(record.number, record.params, shown, "" if choice else why_none(allowed)))

    def ahead(index: int) -> SearchTime:
        plans = [[e.scaled(crowding) for e in found.estimates[index] if e.strategy in wanted and not e.refused]
                 for found in usable.values()]  # fmt: skip
        return search_time(plans, [found.epochs for found in usable.values()], pools[index], total)

    return SearchPlan(tuple(trials), total, ahead(0), ahead(1), ahead(2), crowding)
