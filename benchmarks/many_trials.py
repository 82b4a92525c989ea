"""Writes a study with any number of trials straight into the tables, for measuring readers.

The trials are invented, but every table of a finished search is filled: parameters, values, reports, metrics, attempts
and units on two devices.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution, distribution_to_json
from sqlalchemy import Table, insert

from hydra_tune.storage import StudyRecords, open_storage
from hydra_tune.storage import tables as t
from hydra_tune.storage.database import writing

BEGIN = datetime(2026, 1, 1)
AT_ONCE = 2_000
_FINITE = "FINITE"


SPACE: dict[str, tuple[str, Callable[[random.Random], float]]] = {
    "lr": (distribution_to_json(FloatDistribution(1e-5, 1e-1, log=True)), lambda r: 10 ** r.uniform(-5, -1)),
    "width": (distribution_to_json(IntDistribution(16, 1024, log=True)), lambda r: float(r.randint(16, 1024))),
    "dropout": (distribution_to_json(FloatDistribution(0.0, 0.6)), lambda r: r.uniform(0, 0.6)),
    "depth": (distribution_to_json(IntDistribution(1, 8)), lambda r: float(r.randint(1, 8))),
    "activation": (
        distribution_to_json(CategoricalDistribution(["relu", "gelu", "tanh"])),
        lambda r: float(r.randrange(3)),
    ),
}
"""Each parameter's distribution and the draw of its stored number."""


def write_study(url: str, name: str, trials: int, reports: int, seed: int = 0) -> int:
    """Create the study `name` with `trials` finished trials of `reports` reports each; return its id."""
    chance = random.Random(seed)
    with open_storage(url) as storage:
        study_id = int(storage.create_new_study([optuna.study.StudyDirection.MAXIMIZE], name))
        settings = {"trials": trials, "devices": "2xcpu", "strategy": "auto", "sampler": "tpe", "pruner": "median"}
        StudyRecords(storage, study_id).describe(seed, ["accuracy"], settings, None)
        with writing(storage.engine) as connection:
            top = connection.exec_driver_sql("SELECT coalesce(max(trial_id), 0) FROM trials").scalar_one()
            for start in range(0, trials, AT_ONCE):
                numbers = range(start, min(start + AT_ONCE, trials))
                rows: dict[Table, list[dict[str, Any]]] = {}
                for number in numbers:
                    for table, row in _trial(chance, study_id, top + 1 + number, number, reports):
                        rows.setdefault(table, []).append(row)
                for table, some in rows.items():
                    connection.execute(insert(table), some)
    return study_id


def _trial(chance: random.Random, study_id: int, trial_id: int, number: int, reports: int) -> Iterator[Any]:
    drawn = {name: draw(chance) for name, (_, draw) in SPACE.items()}
    quality = 1 / (1 + math.exp(-3 + abs(math.log10(drawn["lr"]) + 3) + drawn["dropout"])) + chance.gauss(0, 0.01)
    kind = chance.random()
    status = "COMPLETE" if kind < 0.7 else "PRUNED" if kind < 0.95 else "FAILED"
    state = {"FAILED": "FAIL"}.get(status, status)
    seconds = 2.0 + chance.random()
    started = BEGIN + timedelta(seconds=number * 1.25)
    ended = started + timedelta(seconds=seconds)
    yield t.TRIALS, {"trial_id": trial_id, "number": number, "study_id": study_id, "state": state,
                     "datetime_start": started, "datetime_complete": ended}  # fmt: skip
    for name, (distribution, _) in SPACE.items():
        row = {"trial_id": trial_id, "param_name": name, "param_value": drawn[name]}
        yield t.TRIAL_PARAMS, {**row, "distribution_json": distribution}
    if status == "COMPLETE":
        yield t.TRIAL_VALUES, {"trial_id": trial_id, "objective": 0, "value": quality, "value_type": _FINITE}
    steps = reports if status == "COMPLETE" else reports // 3
    for step in range(steps):
        value = quality * (1 - math.exp(-(step + 1) / 8))
        row = {"trial_id": trial_id, "step": step, "intermediate_value": value}
        yield t.TRIAL_REPORTS, {**row, "intermediate_value_type": _FINITE}
    ours = {"study_id": study_id, "number": number}
    error = "RuntimeError: mat1 and mat2 shapes cannot be multiplied" if status == "FAILED" else ""
    device = f"cpu:{number % 2}"
    yield t.HYDRA_TRIALS, {**ours, "seed": number, "strategy": "whole", "shards": 1, "status": status, "device": device,
                           "seconds": seconds, "peak_device_bytes": 10**6, "error": error}  # fmt: skip
    attempt = f"{study_id:08x}{number:024x}"
    yield t.HYDRA_ATTEMPTS, {**ours, "attempt_id": attempt, "attempt": 1, "state": status, "device": device, "pid": 1,
                             "started": started, "ended": ended, "error": error, "traceback": ""}  # fmt: skip
    begun = (started - datetime(1970, 1, 1)).total_seconds()
    for part, work in enumerate(("build", "train")):
        yield t.HYDRA_UNITS, {**ours, "attempt_id": attempt, "kind": work, "device": device,
                              "started": begun + part * 0.2, "seconds": (0.2, seconds - 0.2)[part],
                              "peak_bytes": 10**6}  # fmt: skip
