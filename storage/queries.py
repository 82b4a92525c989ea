"""Reads studies and trials back as plain records, for the command line, the results and the dashboard.

Studies that plain Optuna created are listed too, with the data that Optuna has. Listing studies counts in SQL and loads
no trial.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from optuna.storages._rdb import models
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    Row,
    String,
    Table,
    and_,
    case,
    cast,
    func,
    select,
)

from hydra_tune.core.errors import StorageError, nearest, quoted
from hydra_tune.storage.optuna_storage import HydraStorage
from hydra_tune.storage.rows import StudyRow, load_study
from hydra_tune.storage.tables import (
    HYDRA_ATTEMPTS,
    HYDRA_EVENTS,
    HYDRA_METRICS,
    HYDRA_STUDIES,
    HYDRA_TRIALS,
    HYDRA_UNITS,
    STUDIES,
    TRIAL_VALUES,
    TRIALS,
)

_ValueType = models.TrialValueModel.TrialValueType
_VALUE_RANK = case(
    (TRIAL_VALUES.c.value_type == _ValueType.INF_NEG, -1),
    (TRIAL_VALUES.c.value_type == _ValueType.FINITE, 0),
    else_=1,
)


@dataclass(frozen=True)
class StudySummary:
    """Summary of a study; `trials` is the number of trials by state."""

    name: str
    study_id: int
    directions: tuple[str, ...]
    metrics: tuple[str, ...]
    trials: dict[str, int]
    best_value: float | None
    best_number: int | None
    created: datetime | None
    seed: int | None
    settings: dict[str, Any]
    spec: dict[str, Any] | None
    source: str | None = None
    """Recorded origin of the study's `build` function."""


@dataclass(frozen=True)
class TrialRecord:
    """A trial as shown in results; None means not recorded."""

    number: int
    state: str
    value: float | None
    values: tuple[float, ...] | None
    params: dict[str, Any]
    strategy: str | None
    shards: int | None
    seconds: float | None
    peak_device_bytes: int | None
    communicated_bytes: int | None
    spill_read_bytes: int | None
    spill_written_bytes: int | None
    spilled_bytes: int | None
    """Peak bytes in the spill store."""
    plan: dict[str, Any] | None
    """The device of each part of the model, for strategies with such a plan."""
    seed: int | None
    device: str | None
    error: str | None
    user_attrs: dict[str, Any]


@dataclass(frozen=True)
class AttemptRecord:
    """One attempt at a trial."""

    attempt_id: str
    attempt: int
    state: str
    device: str | None
    pid: int | None
    started: datetime
    ended: datetime | None
    error: str | None
    traceback: str | None


@dataclass(frozen=True)
class UnitRecord:
    """A unit of work on one device; `started` is in seconds since 1970."""

    number: int
    attempt_id: str | None
    kind: str
    device: str | None
    started: float
    seconds: float
    peak_bytes: int | None
    shard: int | None = None
    read_bytes: int | None = None
    written_bytes: int | None = None
    steps: int | None = None
    """Number of steps of this kind and shard that the record sums up."""


def list_studies(storage: HydraStorage) -> list[StudySummary]:
    """Return all studies, ordered by id."""
    with storage.reading() as connection:
        ids = connection.execute(select(STUDIES.c.study_id).order_by(STUDIES.c.study_id)).scalars().all()
        return _summaries(connection, ids, storage.has_hydra_tables)


def study_summary(storage: HydraStorage, name: str) -> StudySummary:
    """Return the study with this name; raise a StorageError with the closest known name if there is none."""
    study_id = find_study(storage, name)
    with storage.reading() as connection:
        return _summaries(connection, [study_id], storage.has_hydra_tables)[0]


def trial_records(storage: HydraStorage, name: str) -> list[TrialRecord]:
    """Return the study's trials, ordered by number."""
    study_id = find_study(storage, name)
    known = {row.number: row for row in _rows(storage, HYDRA_TRIALS, study_id)}
    return [_record(trial, known.get(trial.number)) for trial in storage.get_all_trials(study_id, deepcopy=False)]


def trial_attempts(storage: HydraStorage, name: str, number: int) -> list[AttemptRecord]:
    """Return all attempts at a trial, ordered by start."""
    rows = _rows(storage, HYDRA_ATTEMPTS, find_study(storage, name), number)
    return [
        AttemptRecord(
            attempt_id=row.attempt_id,
            attempt=row.attempt,
            state=row.state,
            device=row.device,
            pid=row.pid,
            started=row.started.replace(tzinfo=UTC),
            ended=row.ended and row.ended.replace(tzinfo=UTC),
            error=row.error,
            traceback=row.traceback,
        )
        for row in sorted(rows, key=lambda row: (row.attempt, row.started))
    ]


def trial_metrics(storage: HydraStorage, name: str, number: int) -> dict[int, dict[str, float]]:
    """Return a trial's metrics by epoch, in order; for an objective, what it reported by step."""
    study_id = find_study(storage, name)
    rows = _rows(storage, HYDRA_METRICS, study_id, number)
    epochs: defaultdict[int, dict[str, float]] = defaultdict(dict)
    if not rows:
        trial = storage.get_trial(storage.get_trial_id_from_study_id_trial_number(study_id, number))
        return {step: {"reported": value} for step, value in sorted(trial.intermediate_values.items())}
    for row in sorted(rows, key=lambda row: (row.epoch, row.name)):
        epochs[row.epoch][row.name] = float(row.special) if row.special else row.value
    return dict(epochs)


def trial_notes(storage: HydraStorage, name: str, number: int) -> list[tuple[str, str]]:
    """Return the events of a trial as (kind, message) pairs, oldest first."""
    rows = _rows(storage, HYDRA_EVENTS, find_study(storage, name), number)
    return [(row.kind, row.message) for row in sorted(rows, key=lambda row: row.event_id)]


def trial_units(storage: HydraStorage, name: str, number: int | None = None) -> list[UnitRecord]:
    """Return the units of a trial, or of the whole study, ordered by start."""
    rows = _rows(storage, HYDRA_UNITS, find_study(storage, name), number)
    return [
        UnitRecord(
            number=row.number,
            attempt_id=row.attempt_id,
            kind=row.kind,
            device=row.device,
            started=row.started,
            seconds=row.seconds,
            peak_bytes=row.peak_bytes,
            shard=row.shard,
            read_bytes=row.read_bytes,
            written_bytes=row.written_bytes,
            steps=row.steps,
        )
        for row in sorted(rows, key=lambda row: (row.started, row.unit_id))
    ]


def find_study(storage: HydraStorage, name: str) -> int:
    """Return the id of the study with this name; raise a StorageError with the closest known name if there is none."""
    try:
        return storage.get_study_id_from_name(name)
    except KeyError:
        with storage.reading() as connection:
            known = connection.execute(select(STUDIES.c.study_name)).scalars().all()
        hint = nearest(name, known) if known else "the database has no studies yet"
        raise StorageError(f"no study is named {quoted(name)}", hint) from None


def _rows(storage: HydraStorage, table: Table, study_id: int, number: int | None = None) -> list[Row[Any]]:
    """Return the rows of a `hydra_` table for a study or one trial; empty if only Optuna's tables exist."""
    if not storage.has_hydra_tables:
        return []
    query = select(table).where(table.c.study_id == study_id)
    if number is not None:
        query = query.where(table.c.number == number)
    with storage.reading() as connection:
        return list(connection.execute(query))


def _summaries(connection: Connection, ids: Iterable[int], has_hydra_tables: bool) -> list[StudySummary]:
    wanted = list(ids)
    counts = _counts(connection, wanted, has_hydra_tables)
    described: dict[int, Row[Any]] = {}
    if has_hydra_tables:
        rows = connection.execute(select(HYDRA_STUDIES).where(HYDRA_STUDIES.c.study_id.in_(wanted)))
        described = {row.study_id: row for row in rows}
    return [
        _summary(connection, load_study(connection, study_id), counts[study_id], described.get(study_id))
        for study_id in wanted
    ]


def _value_names(objectives: int) -> tuple[str, ...]:
    """Return names for the values of a study that plain Optuna created."""
    return ("value",) if objectives == 1 else tuple(f"value_{i}" for i in range(objectives))


def _summary(connection: Connection, study: StudyRow, trials: dict[str, int], row: Row[Any] | None) -> StudySummary:
    best_number, best_value = _best(connection, study)
    return StudySummary(
        name=study.name,
        study_id=study.study_id,
        directions=tuple(direction.name.lower() for direction in study.directions),
        metrics=tuple(json.loads(row.metrics)) if row else _value_names(len(study.directions)),
        trials=trials,
        best_value=best_value,
        best_number=best_number,
        created=row.created.replace(tzinfo=UTC) if row else None,
        seed=row.seed if row else None,
        settings=json.loads(row.settings) if row else {},
        spec=json.loads(row.spec) if row and row.spec else None,
        source=row.source if row else None,
    )


def _counts(connection: Connection, ids: list[int], has_hydra_tables: bool) -> defaultdict[int, dict[str, int]]:
    """Return each study's number of trials by state: our status if recorded, else Optuna's state."""
    state: ColumnElement[str] = cast(TRIALS.c.state, String)
    source: FromClause = TRIALS
    if has_hydra_tables:
        same = and_(HYDRA_TRIALS.c.study_id == TRIALS.c.study_id, HYDRA_TRIALS.c.number == TRIALS.c.number)
        source = TRIALS.outerjoin(HYDRA_TRIALS, same)
        state = func.coalesce(HYDRA_TRIALS.c.status, state)
    query = (
        select(TRIALS.c.study_id, state, func.count())
        .select_from(source)
        .where(TRIALS.c.study_id.in_(ids))
        .group_by(TRIALS.c.study_id, state)
    )
    counts: defaultdict[int, dict[str, int]] = defaultdict(dict)
    for study_id, name, number in connection.execute(query):
        counts[study_id][name] = number
    return counts


def _best(connection: Connection, study: StudyRow) -> tuple[int | None, float | None]:
    """Return the number and value of the best completed trial; (None, None) for several objectives."""
    if len(study.directions) != 1:
        return None, None
    rank, value = _VALUE_RANK, TRIAL_VALUES.c.value
    maximize = study.directions[0] == StudyDirection.MAXIMIZE
    query = (
        select(TRIALS.c.number, value, TRIAL_VALUES.c.value_type)
        .join_from(TRIALS, TRIAL_VALUES, TRIAL_VALUES.c.trial_id == TRIALS.c.trial_id)
        .where(TRIALS.c.study_id == study.study_id, TRIALS.c.state == TrialState.COMPLETE)
        .order_by(rank.desc() if maximize else rank, value.desc() if maximize else value, TRIALS.c.number)
        .limit(1)
    )
    row = connection.execute(query).first()
    if row is None:
        return None, None
    return row.number, models.TrialValueModel.stored_repr_to_value(row.value, row.value_type)


def _record(trial: FrozenTrial, row: Row[Any] | None) -> TrialRecord:
    values = trial.values
    return TrialRecord(
        number=trial.number,
        state=row.status if row and row.status else trial.state.name,
        value=values[0] if values and len(values) == 1 else None,
        values=tuple(values) if values else None,
        params=dict(trial.params),
        strategy=row.strategy if row else None,
        shards=row.shards if row else None,
        seconds=row.seconds if row else None,
        peak_device_bytes=row.peak_device_bytes if row else None,
        communicated_bytes=row.communicated_bytes if row else None,
        spill_read_bytes=row.spill_read_bytes if row else None,
        spill_written_bytes=row.spill_written_bytes if row else None,
        spilled_bytes=row.spilled_bytes if row else None,
        plan=json.loads(row.plan) if row and row.plan else None,
        seed=row.seed if row else None,
        device=row.device if row else None,
        error=row.error if row else None,
        user_attrs=dict(trial.user_attrs),
    )
