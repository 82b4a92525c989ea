"""Detailed reads of one study or one trial by id and number, from indexed rows; nothing here reads all trials.

`queries` reads by name and returns records for the command line; this module serves pages that show one item.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from optuna.storages._rdb import models
from sqlalchemy import BigInteger, Connection, Row, Table, cast, func, select

from hydra_tune.storage.rows import chunks
from hydra_tune.storage.tables import (
    HYDRA_ATTEMPTS,
    HYDRA_CHECKPOINTS,
    HYDRA_EVENTS,
    HYDRA_METRICS,
    HYDRA_STUDIES,
    HYDRA_TRIALS,
    HYDRA_UNITS,
    TRIAL_REPORTS,
    TRIAL_USER_ATTRS,
)

POOL = "pool"
"""Kind of the event that records the devices of a run and their memory budgets in bytes."""
_to_report = models.TrialIntermediateValueModel.stored_repr_to_intermediate_value


@dataclass(frozen=True)
class Described:
    """Our own record of a study."""

    metrics: tuple[str, ...]
    settings: dict[str, Any]
    spec: dict[str, Any] | None
    seed: int | None
    created: datetime
    version: str


@dataclass(frozen=True)
class Event:
    """An event in the history of a study or a trial."""

    number: int | None
    happened: datetime
    kind: str
    message: str


@dataclass(frozen=True)
class KindOfWork:
    """Totals of a trial's units of one kind and shard on one device."""

    kind: str
    device: str
    shard: int | None
    units: int
    seconds: float
    peak_bytes: int | None
    read_bytes: int
    written_bytes: int


def described(connection: Connection, study_id: int) -> Described | None:
    """Return our record of a study; None if plain Optuna created it."""
    row = connection.execute(select(HYDRA_STUDIES).where(HYDRA_STUDIES.c.study_id == study_id)).first()
    if row is None:
        return None
    return Described(
        metrics=tuple(json.loads(row.metrics)),
        settings=json.loads(row.settings),
        spec=json.loads(row.spec) if row.spec else None,
        seed=row.seed,
        created=row.created,
        version=row.version,
    )


def pool(connection: Connection, study_id: int) -> dict[str, int]:
    """Return the memory budget in bytes of each device in the study's last run; empty if not recorded."""
    table = HYDRA_EVENTS
    query = select(table.c.message).where(table.c.study_id == study_id, table.c.kind == POOL, table.c.number.is_(None))
    text = connection.execute(query.order_by(table.c.event_id.desc()).limit(1)).scalar()
    return json.loads(text) if text else {}


def events(connection: Connection, study_id: int, number: int | None, limit: int = 100) -> list[Event]:
    """Return the latest events of one trial, or of the study and all its trials; newest first."""
    table = HYDRA_EVENTS
    query = select(table.c.number, table.c.happened, table.c.kind, table.c.message)
    query = query.where(table.c.study_id == study_id, table.c.kind != POOL)
    if number is not None:
        query = query.where(table.c.number == number)
    rows = connection.execute(query.order_by(table.c.event_id.desc()).limit(limit))
    return [Event(**row._mapping) for row in rows]


def trial_row(connection: Connection, study_id: int, number: int) -> Row[Any] | None:
    """Return our record of a trial, including its plan."""
    table = HYDRA_TRIALS
    return connection.execute(select(table).where(table.c.study_id == study_id, table.c.number == number)).first()


def of_trial(connection: Connection, table: Table, study_id: int, number: int, order: str) -> list[Row[Any]]:
    """Return a trial's rows in a `hydra_` table, ordered by one column."""
    query = select(table).where(table.c.study_id == study_id, table.c.number == number)
    return list(connection.execute(query.order_by(table.c[order])))


def attempts(connection: Connection, study_id: int, number: int) -> list[Row[Any]]:
    return of_trial(connection, HYDRA_ATTEMPTS, study_id, number, "attempt")


def checkpoints(connection: Connection, study_id: int, number: int) -> list[Row[Any]]:
    return of_trial(connection, HYDRA_CHECKPOINTS, study_id, number, "step")


def curves(connection: Connection, study_id: int, number: int) -> dict[str, list[tuple[int, float]]]:
    """Return every metric of a trial as (epoch, value) pairs, in order."""
    found: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in of_trial(connection, HYDRA_METRICS, study_id, number, "epoch"):
        found[row.name].append((row.epoch, float(row.special) if row.special else row.value))
    return dict(found)


def work(connection: Connection, study_id: int, number: int) -> list[KindOfWork]:
    """Return the totals of a trial's units by kind, shard and device."""
    u = HYDRA_UNITS.c
    key = (u.kind, u.device, u.shard)
    sums = (
        func.sum(func.coalesce(u.steps, 1)), func.sum(u.seconds), func.max(u.peak_bytes),
        cast(func.coalesce(func.sum(u.read_bytes), 0), BigInteger),
        cast(func.coalesce(func.sum(u.written_bytes), 0), BigInteger),
    )  # fmt: skip
    query = select(*key, *sums).where(u.study_id == study_id, u.number == number).group_by(*key)
    rows = connection.execute(query.order_by(func.min(u.started)))
    return [KindOfWork(row[0], row[1] or "", *row[2:]) for row in rows]


def reports(connection: Connection, trial_ids: Sequence[int]) -> dict[int, list[tuple[int, float]]]:
    """Return the intermediate values of some trials as (step, value) pairs, in order."""
    table = TRIAL_REPORTS
    found: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
    columns = (table.c.trial_id, table.c.step, table.c.intermediate_value, table.c.intermediate_value_type)
    for ids in chunks(list(trial_ids)):
        query = select(*columns).where(table.c.trial_id.in_(ids)).order_by(table.c.trial_id, table.c.step)
        for trial_id, step, value, kind in connection.execute(query):
            found[trial_id].append((step, _to_report(value, kind)))
    return dict(found)


def user_attrs(connection: Connection, trial_id: int) -> dict[str, Any]:
    """Return the attributes that user code has set on a trial."""
    table = TRIAL_USER_ATTRS
    rows = connection.execute(select(table.c.key, table.c.value_json).where(table.c.trial_id == trial_id))
    return {key: json.loads(text) for key, text in rows}
