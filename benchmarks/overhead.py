"""Overhead of a search around user code: a trivial objective of 5 parameters and 10 reports on two workers.

Hydra Tune writes every trial durably to SQLite, from two worker processes. Optuna writes to SQLite, to a journal file
or to memory, from two threads (`n_jobs=2`). Rustuna, Optuna's interface written in Rust, runs one trial after the other
in one process, on SQLite and in memory, and without the reports: its trials have none. Ray Tune keeps its own state.
All sample at random. The time runs from the first to the last trial's end, so that start-up is excluded.

All of it is overhead: the objective does nothing. What overhead is of a whole search is shown by trials that compute
for 0.2 s each, one at a time (`..._whole_ms_per_trial_of_200`).
"""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import optuna

import hydra_tune as ht
from benchmarks.report import arguments, finish, interleaved, ratios, spread

PARAMETERS, REPORTS = 5, 10
Storage: TypeAlias = Callable[[str], optuna.storages.BaseStorage]
"""Makes a storage in a folder."""


def objective(trial: Any) -> float:
    total = sum(trial.suggest_float(f"x{i}", -1.0, 1.0) for i in range(PARAMETERS))
    for step in range(REPORTS):
        trial.report(total + step, step)
    return float(total)


def ms_per_trial(ends: list[float]) -> float:
    """Return the mean milliseconds between the ends of consecutive trials."""
    return 1000 * (max(ends) - min(ends)) / (len(ends) - 1)


def hydra(trials: int) -> float:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        result = ht.search(
            objective,
            trials=trials,
            sampler="random",
            devices="2xcpu",
            storage=f"sqlite:///{folder}/hydra.db",
            progress=False,
        )
        ends = [trial.datetime_complete.timestamp() for trial in result.study.trials]
        assert len(ends) == trials
        result.close()
    return ms_per_trial(ends)


def optuna_on(make: Storage, trials: int, run: Any = objective, jobs: int = 2) -> float:
    """Return Optuna's milliseconds per trial on the storage that `make(folder)` returns."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        storage = make(folder)
        study = optuna.create_study(storage=storage, sampler=optuna.samplers.RandomSampler())
        study.optimize(run, n_trials=trials, n_jobs=jobs)
        ends = [trial.datetime_complete.timestamp() for trial in study.trials]
        assert len(ends) == trials
        if isinstance(storage, optuna.storages.RDBStorage):
            storage.remove_session()
            storage.engine.dispose()
    return ms_per_trial(ends)


def sqlite_storage(folder: str) -> optuna.storages.BaseStorage:
    return optuna.storages.RDBStorage(
        f"sqlite:///{folder}/optuna.db", engine_kwargs={"connect_args": {"timeout": 60}}
    )  # fmt: skip


def journal_storage(folder: str) -> optuna.storages.BaseStorage:
    backend = optuna.storages.journal.JournalFileBackend(f"{folder}/journal.log")
    return optuna.storages.JournalStorage(backend)


def memory_storage(folder: str) -> optuna.storages.BaseStorage:
    return optuna.storages.InMemoryStorage()


def rustuna_on(kind: str, trials: int) -> float:
    """Return Rustuna's milliseconds per trial, of the 5 parameters only; it has no `n_jobs`."""
    import rustuna

    ends: list[float] = []

    def ending(trial: Any) -> float:
        total = sum(trial.suggest_float(f"x{i}", -1.0, 1.0) for i in range(PARAMETERS))
        ends.append(time.time())
        return float(total)

    with tempfile.TemporaryDirectory(dir=".") as folder:
        storage = (
            rustuna.storages.SQLite3Storage(f"{folder}/rustuna.db")
            if kind == "sqlite"
            else rustuna.storages.InMemoryStorage()
        )
        study = rustuna.create_study(storage=storage, sampler=rustuna.samplers.RandomSampler(), direction="minimize")
        study.optimize(ending, n_trials=trials)
        del study, storage
    assert len(ends) == trials
    return ms_per_trial(ends)


def ray_objective(config: dict[str, float]) -> None:
    from ray import tune

    total = sum(config.values())
    for step in range(REPORTS):
        tune.report({"value": total + step, "ended": time.time()})


def ray_tune(trials: int) -> float:
    from ray import tune

    with tempfile.TemporaryDirectory() as folder:
        tuner = tune.Tuner(
            ray_objective,
            param_space={f"x{i}": tune.uniform(-1.0, 1.0) for i in range(PARAMETERS)},
            tune_config=tune.TuneConfig(
                num_samples=trials, metric="value", mode="min", reuse_actors=True, max_concurrent_trials=2
            ),
            run_config=tune.RunConfig(storage_path=str(Path(folder).resolve()), verbose=0),
        )
        with contextlib.redirect_stdout(io.StringIO()):  # its banner, which verbose=0 does not silence
            ends = [result.metrics["ended"] for result in tuner.fit()]
    assert len(ends) == trials
    return ms_per_trial(ends)


def burn(trial: Any) -> float:
    """Run about one CPU-bound second: the same work each time."""
    began = time.time()
    total = 0
    for i in range(12_000_000):
        total += i * i
    trial.set_user_attr("span", [began, time.time()])
    return float(total % 7)


def computes(trial: Any) -> float:
    """Compute for 0.2 s of this thread's processor time, around what `objective` does."""
    began = time.thread_time()
    while time.thread_time() - began < 0.2:
        sum(range(1000))
    return objective(trial)


def whole_ms(devices: str, trials: int) -> float:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        url = f"sqlite:///{folder}/whole.db"
        result = ht.search(computes, trials=trials, devices=devices, storage=url, progress=False, sampler="random")
        ends = [trial.datetime_complete.timestamp() for trial in result.study.trials]
        result.close()
    return ms_per_trial(ends)


def burn_seconds(devices: str, trials: int) -> float:
    with tempfile.TemporaryDirectory(dir=".") as folder:
        result = ht.search(
            burn,
            trials=trials,
            devices=devices,
            storage=f"sqlite:///{folder}/burn.db",
            progress=False,
            sampler="random",
        )
        spans = [record.user_attrs["span"] for record in result.trials]
        result.close()
    return max(end for _, end in spans) - min(begin for begin, _ in spans)


def reports_per_second(reports: int) -> float:
    """Return the number of one trial's reports that are durably stored per second."""

    def reporting(trial: Any) -> float:
        began = time.perf_counter()
        for step in range(reports):
            trial.report(float(step), step)
        trial.should_prune()  # answered after all reports have been received
        trial.set_user_attr("rate", reports / (time.perf_counter() - began))
        return 0.0

    with tempfile.TemporaryDirectory(dir=".") as folder:
        url = f"sqlite:///{folder}/reports.db"
        result = ht.search(reporting, trials=1, devices="1xcpu", storage=url, progress=False)
        assert len(result.study.trials[0].intermediate_values) == reports
        rate = float(result.trials[0].user_attrs["rate"])
        result.close()
    return rate


def growth(few: int, many: int, measured: int = 200) -> float:
    """Return the cost of a trial with `many` trials in the study, relative to `few`."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        url = f"sqlite:///{folder}/growth.db"
        costs = {}
        for stored in (few, many):
            for total, resume in ((stored, stored != few), (stored + measured, True)):
                options: dict[str, Any] = {"study": "g", "storage": url, "sampler": "random", "devices": "2xcpu"}
                result = ht.search(objective, trials=total, resume=resume, progress=False, **options)
                ends = sorted(trial.datetime_complete.timestamp() for trial in result.study.trials[-measured:])
                result.close()
            costs[stored] = ms_per_trial(ends)
    return costs[many] / costs[few]


def main() -> None:
    options = arguments(__doc__ or "")
    import ray

    warnings.filterwarnings("ignore")
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1", logging_level="ERROR"
    )
    rounds = options.rounds or (1 if options.quick else 5)
    scale = 0.2 if options.quick else 1.0
    measured = interleaved(
        {
            "hydra_ms_per_trial": lambda: hydra(int(1000 * scale)),
            "optuna_sqlite_ms_per_trial": lambda: optuna_on(sqlite_storage, int(200 * scale)),
            "optuna_journal_ms_per_trial": lambda: optuna_on(journal_storage, int(200 * scale)),
            "optuna_memory_ms_per_trial": lambda: optuna_on(memory_storage, int(1000 * scale)),
            "rustuna_sqlite_ms_per_trial": lambda: rustuna_on("sqlite", int(200 * scale)),
            "rustuna_memory_ms_per_trial": lambda: rustuna_on("memory", int(1000 * scale)),
            "ray_tune_ms_per_trial": lambda: ray_tune(int(100 * scale)),
        },
        rounds,
    )
    ray.shutdown()
    whole = interleaved(
        {
            "hydra_whole_ms_per_trial_of_200": lambda: whole_ms("1xcpu", int(50 * scale)),
            "optuna_whole_ms_per_trial_of_200": lambda: optuna_on(sqlite_storage, int(50 * scale), computes, 1),
        },
        rounds,
    )
    burns = interleaved(
        {"one": lambda: burn_seconds("1xcpu", 12), "two": lambda: burn_seconds("2xcpu", 12)},
        1 if options.quick else rounds,
    )
    ours = measured["hydra_ms_per_trial"]
    faster = {
        **{
            f"vs_{name.removesuffix('_ms_per_trial')}": ratios(values, ours)
            for name, values in measured.items()
            if values is not ours
        },
        "whole_time_vs_optuna": ratios(*whole.values()),
        "two_workers_vs_one": ratios(burns["one"], burns["two"]),
    }
    rates = [reports_per_second(int(20_000 * scale)) for _ in range(rounds)]
    growths = [growth(int(1000 * scale), int(10_000 * scale)) for _ in range(1 if options.quick else 3)]
    everything = {**measured, **whole, **faster, "reports_per_second": rates, "cost_at_10000_vs_1000_trials": growths}
    finish(
        [(name, spread(values)) for name, values in everything.items()],
        {name: round(statistics.median(values), 3) for name, values in everything.items()},
    )


if __name__ == "__main__":
    main()
