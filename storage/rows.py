"""Converts between Optuna's objects and rows of Optuna's tables.

Reading returns `FrozenTrial`s, writing returns rows as dictionaries. This module keeps no state: `cache` holds data
that was read, `write_queue` rows to be written.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from optuna.distributions import BaseDistribution, distribution_to_json, json_to_distribution
from optuna.storages._rdb import models
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import Connection, Row, Table, or_, select

from hydra_tune.core.errors import StorageError, quoted
from hydra_tune.storage.tables import (
    LONGEST_NAME,
    STUDIES,
    STUDY_DIRECTIONS,
    STUDY_SYSTEM_ATTRS,
    STUDY_USER_ATTRS,
    TRIAL_PARAMS,
    TRIAL_REPORTS,
    TRIAL_SYSTEM_ATTRS,
    TRIAL_USER_ATTRS,
    TRIAL_VALUES,
    TRIALS,
)

# SQLite allows 32,766 bound values per statement; far fewer keep the compiled statement small.
IDS_AT_ONCE = 500

_to_value = models.TrialValueModel.stored_repr_to_value
_to_report = models.TrialIntermediateValueModel.stored_repr_to_intermediate_value


@dataclass(frozen=True)
class StudyRow:
    """A study without its trials."""

    study_id: int
    name: str
    directions: list[StudyDirection]
    user_attrs: dict[str, Any]
    system_attrs: dict[str, Any]


def load_study(connection: Connection, study_id: int) -> StudyRow:
    """Return a study's name, directions and attributes; raise a KeyError if there is none."""
    name = connection.execute(select(STUDIES.c.study_name).where(STUDIES.c.study_id == study_id)).scalar()
    if name is None:
        raise KeyError(f"no study has the id {study_id}")
    directions = connection.execute(
        select(STUDY_DIRECTIONS.c.direction)
        .where(STUDY_DIRECTIONS.c.study_id == study_id)
        .order_by(STUDY_DIRECTIONS.c.objective)
    )
    return StudyRow(
        study_id=study_id,
        name=name,
        directions=list(directions.scalars()),
        user_attrs=_load_study_attrs(connection, STUDY_USER_ATTRS, study_id),
        system_attrs=_load_study_attrs(connection, STUDY_SYSTEM_ATTRS, study_id),
    )


def load_trials(connection: Connection, study_id: int, after: int, also: Iterable[int] = ()) -> list[FrozenTrial]:
    """Return the study's trials with an id greater than `after` or in `also`, ordered by id."""
    # Read `trials` first: on PostgreSQL each statement has its own snapshot, and all rows of a trial that is finished
    # in this one are committed.
    wanted = TRIALS.c.trial_id > after
    trials: dict[int, Row[Any]] = {}
    for ids in chunks(sorted(also)) or [[]]:
        condition = or_(wanted, TRIALS.c.trial_id.in_(ids)) if ids else wanted
        query = select(TRIALS).where(TRIALS.c.study_id == study_id, condition).order_by(TRIALS.c.trial_id)
        trials.update({row.trial_id: row for row in connection.execute(query)})
    parts: dict[int, _Parts] = {trial_id: _Parts() for trial_id in sorted(trials)}
    for ids in chunks(list(parts)):
        _load_parts(connection, ids, parts)
    return [_frozen(trials[trial_id], part) for trial_id, part in parts.items()]


def trial_row(trial: FrozenTrial) -> dict[str, Any]:
    """Return the columns of `trials` that change during a trial."""
    return {
        "state": trial.state,
        "datetime_start": _to_utc(trial.datetime_start),
        "datetime_complete": _to_utc(trial.datetime_complete),
    }


def content_rows(trial: FrozenTrial) -> Iterator[tuple[Table, dict[str, Any]]]:
    """Yield the rows for everything that a trial already holds, without its id."""
    yield from value_rows(trial.values)
    for name, distribution in trial.distributions.items():
        yield TRIAL_PARAMS, param_row(name, distribution.to_internal_repr(trial.params[name]), distribution)
    for step, value in trial.intermediate_values.items():
        yield TRIAL_REPORTS, report_row(step, value)
    for key, attr in trial.user_attrs.items():
        yield TRIAL_USER_ATTRS, attr_row(key, attr)
    for key, attr in trial.system_attrs.items():
        yield TRIAL_SYSTEM_ATTRS, attr_row(key, attr)


def value_rows(values: Sequence[float] | None) -> Iterator[tuple[Table, dict[str, Any]]]:
    """Yield one row per objective value."""
    for objective, value in enumerate(values or ()):
        stored, kind = models.TrialValueModel.value_to_stored_repr(float(value))
        yield TRIAL_VALUES, {"objective": objective, "value": stored, "value_type": kind}


def param_row(name: str, internal: float, distribution: BaseDistribution) -> dict[str, Any]:
    """Return the row of a parameter, with its value in Optuna's internal form."""
    return {
        "param_name": storable_name("parameter", name),
        "param_value": float(internal),
        "distribution_json": distribution_to_json(distribution),
    }


def report_row(step: int, value: float) -> dict[str, Any]:
    """Return the row of an intermediate value."""
    if not -(2**31) <= step < 2**31:
        raise StorageError(f"step {quoted(step)} of a report cannot be stored", f"report steps up to {2**31 - 1}")
    stored, kind = models.TrialIntermediateValueModel.intermediate_value_to_stored_repr(float(value))
    return {"step": int(step), "intermediate_value": stored, "intermediate_value_type": kind}


def attr_row(key: str, value: object) -> dict[str, Any]:
    """Return the row of a user or system attribute."""
    return {"key": storable_name("attribute", key), "value_json": json.dumps(value)}


def storable_name(kind: str, name: str) -> str:
    """Return `name` if every database accepts it, else raise a StorageError: PostgreSQL is stricter than SQLite."""
    if len(name) > LONGEST_NAME:
        raise StorageError(f"{kind} name {quoted(name)} has {len(name)} characters", f"use at most {LONGEST_NAME}")
    if "\0" in name or any("\ud800" <= character <= "\udfff" for character in name):
        raise StorageError(f"{kind} name {quoted(name)} holds a NUL or half a character", "use printable text")
    return name


class _Parts:
    """One trial's data from the tables other than `trials`, while the trial is assembled."""

    def __init__(self) -> None:
        self.params: dict[str, Any] = {}
        self.distributions: dict[str, BaseDistribution] = {}
        self.values: list[float] = []
        self.reports: dict[int, float] = {}
        self.user_attrs: dict[str, Any] = {}
        self.system_attrs: dict[str, Any] = {}


def _load_parts(connection: Connection, ids: Sequence[int], parts: Mapping[int, _Parts]) -> None:
    """Fill in the parts of the trials `ids` from the five tables that refer to `trials`."""

    def rows(table: Table, order: str) -> Iterator[Row[Any]]:
        yield from connection.execute(select(table).where(table.c.trial_id.in_(ids)).order_by(table.c[order]))

    for row in rows(TRIAL_PARAMS, "param_id"):
        distribution = _distribution(row.distribution_json)
        parts[row.trial_id].params[row.param_name] = distribution.to_external_repr(row.param_value)
        parts[row.trial_id].distributions[row.param_name] = distribution
    for row in rows(TRIAL_VALUES, "objective"):
        parts[row.trial_id].values.append(_to_value(row.value, row.value_type))
    for row in rows(TRIAL_REPORTS, "step"):
        value = _to_report(row.intermediate_value, row.intermediate_value_type)
        parts[row.trial_id].reports[row.step] = value
    for row in rows(TRIAL_USER_ATTRS, "trial_user_attribute_id"):
        parts[row.trial_id].user_attrs[row.key] = json.loads(row.value_json)
    for row in rows(TRIAL_SYSTEM_ATTRS, "trial_system_attribute_id"):
        parts[row.trial_id].system_attrs[row.key] = json.loads(row.value_json)


def _frozen(row: Row[Any], parts: _Parts) -> FrozenTrial:
    state: TrialState = row.state
    return FrozenTrial(
        number=row.number,
        state=state,
        value=None,
        values=parts.values or None,
        datetime_start=_to_local(row.datetime_start),
        datetime_complete=_to_local(row.datetime_complete),
        params=parts.params,
        distributions=parts.distributions,
        user_attrs=parts.user_attrs,
        system_attrs=parts.system_attrs,
        intermediate_values=parts.reports,
        trial_id=row.trial_id,
    )


# A study has few distributions and many trials, so trials share these immutable objects.
@lru_cache(maxsize=4096)
def _distribution(text: str) -> BaseDistribution:
    with warnings.catch_warnings():
        # Optuna warns of choices that are lists; the code that suggested them has been warned.
        warnings.simplefilter("ignore", UserWarning)
        return json_to_distribution(text)


def _load_study_attrs(connection: Connection, table: Table, study_id: int) -> dict[str, Any]:
    rows = connection.execute(select(table.c.key, table.c.value_json).where(table.c.study_id == study_id))
    return {key: json.loads(text) for key, text in rows}


def chunks(ids: Sequence[int]) -> list[Sequence[int]]:
    """Split the ids into portions that fit one statement."""
    return [ids[start : start + IDS_AT_ONCE] for start in range(0, len(ids), IDS_AT_ONCE)]


# Optuna's trials hold local times without a zone; its tables hold UTC without a zone.
def _to_utc(moment: datetime | None) -> datetime | None:
    return None if moment is None else moment.astimezone(UTC).replace(tzinfo=None)


def _to_local(moment: datetime | None) -> datetime | None:
    return None if moment is None else moment.replace(tzinfo=UTC).astimezone().replace(tzinfo=None)
