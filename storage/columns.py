"""The trials of a study as numeric columns, for views of all trials at once.

A dashboard sorts, filters and plots fifty thousand trials many times a minute. Finished trials never change, so each is
read once and kept as a row in a few arrays; a refresh reads only new and unfinished trials. Intermediate reports are
not kept: there are a hundred times as many, and no view shows all of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, json_to_distribution
from optuna.storages._rdb import models
from optuna.study import StudyDirection
from sqlalchemy import ColumnElement, Connection, Select, String, Table, cast, select

from hydra_tune.storage.rows import IDS_AT_ONCE, chunks, load_study
from hydra_tune.storage.tables import HYDRA_TRIALS, TRIAL_PARAMS, TRIAL_VALUES, TRIALS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FACTS = ("seconds", "peak_device_bytes", "shards", "communicated_bytes", "spill_read_bytes", "spill_written_bytes")
"""Numeric columns of a trial from our own records; NaN means not recorded."""
UNFINISHED = frozenset({"RUNNING", "WAITING"})
_FIRST_ROWS = 256
Moments = Sequence[datetime | str | None]
_KIND = TRIAL_VALUES.c.value_type
_KINDS = {kind.name: kind for kind in models.TrialValueModel.TrialValueType}
_FINITE = models.TrialValueModel.TrialValueType.FINITE.name
_to_value = models.TrialValueModel.stored_repr_to_value


@dataclass
class _Text:
    """A text column with few distinct words: each row holds the index of its word."""

    words: list[str]
    codes: dict[str, int]

    @classmethod
    def empty(cls) -> _Text:
        return cls([""], {"": 0})

    def codes_of(self, words: Sequence[str | None]) -> Ints:
        """Return the index of each word; 0 for no word."""
        for word in set(words):
            if word and word not in self.codes:
                self.codes[word] = len(self.words)
                self.words.append(word)
        return np.array([self.codes[word or ""] for word in words], np.int64)


class StudyColumns:
    """One study's columns: row i of every column is trial number i (Optuna numbers trials without gaps)."""

    def __init__(self, connection: Connection, study_id: int, has_hydra_tables: bool) -> None:
        """Read the study; raise a KeyError if it does not exist."""
        study = load_study(connection, study_id)
        self.study_id = study_id
        self.name = study.name
        self.maximize = [direction == StudyDirection.MAXIMIZE for direction in study.directions]
        self.size = 0
        self.version = 0
        """Number of refreshes that changed something; `changed` holds the version of each row's last change."""
        self.distributions: dict[str, BaseDistribution] = {}
        self.errors: dict[int, str] = {}
        self._has_hydra_tables = has_hydra_tables
        self._last_id = 0
        self._open: dict[int, int] = {}
        """Number of each unfinished trial, by trial id."""
        self._words = {name: _Text.empty() for name in ("state", "strategy", "device")}
        self._arrays: dict[str, NDArray[Any]] = {}
        self._params: dict[str, Floats] = {}
        self._first_ids: dict[str, int] = {}
        """The smallest row id of each parameter, which gives their order: databases return rows in any order."""
        self._values = np.full((_FIRST_ROWS, len(self.maximize)), np.nan)
        for name in ("id", "changed", *self._words):
            self._arrays[name] = np.zeros(_FIRST_ROWS, np.int64)
        for name in ("started", "ended", *FACTS):
            self._arrays[name] = np.full(_FIRST_ROWS, np.nan)
        self.refresh(connection)

    # Accessors

    def column(self, name: str) -> Floats:
        """Return the column `started` or `ended` (seconds since 1970) or one of FACTS."""
        return self._arrays[name][: self.size]

    @property
    def changed(self) -> Ints:
        return self._arrays["changed"][: self.size]

    @property
    def ids(self) -> Ints:
        """Optuna's trial ids."""
        return self._arrays["id"][: self.size]

    @property
    def values(self) -> Floats:
        """Objective values, one column per objective; NaN if a trial has no value."""
        return self._values[: self.size]

    @property
    def param_names(self) -> list[str]:
        """Parameter names in the order in which trials first had them."""
        return sorted(self._params, key=self._first_ids.__getitem__)

    def param(self, name: str) -> Floats:
        """Return a parameter in Optuna's internal form (the index of a category); NaN if a trial lacks it."""
        return self._params[name][: self.size]

    def param_value(self, name: str, number: int) -> Any:
        """Return a trial's parameter in the user's form; None if the trial lacks it."""
        internal = float(self._params[name][number])
        return None if math.isnan(internal) else self.distributions[name].to_external_repr(internal)

    def params(self, number: int) -> dict[str, Any]:
        found = {name: self.param_value(name, number) for name in self.param_names}
        return {name: value for name, value in found.items() if value is not None}

    def choices(self, name: str) -> tuple[Any, ...] | None:
        """Return the categories of a categorical parameter; None for other parameters."""
        distribution = self.distributions[name]
        return distribution.choices if isinstance(distribution, CategoricalDistribution) else None

    def words(self, name: str) -> NDArray[Any]:
        """Return the `state`, `strategy` or `device` of each trial."""
        words: NDArray[Any] = np.array(self._words[name].words, dtype=object)
        return np.take(words, self._arrays[name][: self.size])

    def word(self, name: str, number: int) -> str:
        return self._words[name].words[int(self._arrays[name][number])]

    def in_states(self, states: Iterable[str]) -> NDArray[np.bool_]:
        """Return a mask of the trials in any of these states."""
        known = self._words["state"].codes
        wanted = [known[state] for state in states if state in known]
        return np.isin(self._arrays["state"][: self.size], wanted)

    @property
    def complete(self) -> NDArray[np.bool_]:
        """Mask of completed trials that have a value for every objective."""
        return self.in_states(["COMPLETE"]) & ~np.isnan(self.values).any(axis=1)

    def counts(self) -> dict[str, int]:
        """Return the number of trials in each state."""
        codes, counts = np.unique(self._arrays["state"][: self.size], return_counts=True)
        words = self._words["state"].words
        return {words[code]: int(count) for code, count in zip(codes, counts, strict=True)}

    # Reading

    def refresh(self, connection: Connection) -> None:
        """Read new and unfinished trials; raise a KeyError if the study is gone or another study has its id."""
        self._check_identity(connection)
        known = sorted(self._open)
        after = self._last_id
        trials = self._rows(connection, self._trials(), after, known)
        if not trials:
            return
        ids, numbers, states, started, ended = zip(*trials, strict=True)
        self._grow(max(numbers) + 1)
        before = {number: self._fingerprint(number) for number in numbers if number < self.size}
        self.size = max(self.size, max(numbers) + 1)
        self._take_trials(ids, numbers, states, started, ended)
        self._take_values(connection, after, known)
        self._take_params(connection, after, known)
        if self._has_hydra_tables:
            self._take_facts(connection, sorted(numbers))
        self._stamp(numbers, before)

    def _check_identity(self, connection: Connection) -> None:
        name = load_study(connection, self.study_id).name
        last = select(TRIALS.c.number).where(TRIALS.c.trial_id == self._last_id, TRIALS.c.study_id == self.study_id)
        if name != self.name or (self.size and connection.execute(last).scalar() is None):
            raise KeyError(f"study {self.study_id} is another one now")

    def _trials(self) -> Select[Any]:
        # Read the state as text: converting each to an enum costs more than reading it.
        state = cast(TRIALS.c.state, String)
        return select(TRIALS.c.trial_id, TRIALS.c.number, state, TRIALS.c.datetime_start, TRIALS.c.datetime_complete)

    def _rows(self, connection: Connection, query: Select[Any], after: int, known: Sequence[int]) -> list[Any]:
        """Return the rows of trials newer than `after` and of the trial ids in `known`."""
        mine = query.where(TRIALS.c.study_id == self.study_id).order_by(TRIALS.c.trial_id)
        rows: list[Any] = _fetched(connection, mine.where(TRIALS.c.trial_id > after))
        for ids in chunks(known):
            rows += _fetched(connection, query.where(TRIALS.c.trial_id.in_(ids)))
        return rows

    def _take_trials(
        self, ids: Sequence[int], numbers: Sequence[int], states: Sequence[str], started: Moments, ended: Moments
    ) -> None:
        rows = np.array(numbers)
        self._arrays["id"][rows] = ids
        self._arrays["state"][rows] = self._words["state"].codes_of(states)
        self._arrays["started"][rows] = _seconds(started)
        self._arrays["ended"][rows] = _seconds(ended)
        self._last_id = max(self._last_id, max(ids))
        for trial_id, number, state in zip(ids, numbers, states, strict=True):
            if state in UNFINISHED:
                self._open[trial_id] = number
            else:
                self._open.pop(trial_id, None)

    def _take_values(self, connection: Connection, after: int, known: Sequence[int]) -> None:
        wanted = (TRIALS.c.number, TRIAL_VALUES.c.objective, TRIAL_VALUES.c.value, cast(_KIND, String))
        # On PostgreSQL a statement may see trials that the previous one did not.
        found = [
            row for row in self._rows(connection, _joined(wanted, TRIAL_VALUES), after, known) if row[0] < self.size
        ]
        if found:
            numbers, objectives, values, kinds = zip(*found, strict=True)
            stored = np.array(values, dtype=np.float64)
            for i, kind in enumerate(kinds):
                if kind != _FINITE:
                    stored[i] = _to_value(values[i], _KINDS[kind])
            self._values[np.array(numbers), np.array(objectives)] = stored

    def _take_params(self, connection: Connection, after: int, known: Sequence[int]) -> None:
        wanted = (TRIALS.c.number, *(TRIAL_PARAMS.c[name] for name in ("param_name", "param_value", "param_id")))
        found: defaultdict[str, list[Any]] = defaultdict(list)
        for number, name, value, param_id in self._rows(connection, _joined(wanted, TRIAL_PARAMS), after, known):
            if number < self.size:
                found[name] += (number, value, param_id)
        for name, flat in found.items():
            if name not in self._params:
                first = self._first_ids[name] = min(flat[2::3])
                query = select(TRIAL_PARAMS.c.distribution_json).where(TRIAL_PARAMS.c.param_id == first)
                self.distributions[name] = json_to_distribution(connection.execute(query).scalar_one())
                self._params[name] = np.full(len(self._values), np.nan)
            self._params[name][np.array(flat[::3])] = flat[1::3]

    def _take_facts(self, connection: Connection, numbers: Sequence[int]) -> None:
        table = HYDRA_TRIALS
        names = ("number", "status", "error", "strategy", "device", *FACTS)
        query = select(*(table.c[name] for name in names)).where(table.c.study_id == self.study_id)
        if len(numbers) < IDS_AT_ONCE:
            query = query.where(table.c.number.in_(numbers))
        found = [row for row in _fetched(connection, query.where(table.c.number >= numbers[0])) if row[0] < self.size]
        if not found:
            return
        mine, statuses, errors, *columns = zip(*found, strict=True)
        rows, arrays = np.array(mine), self._arrays
        codes = self._words["state"].codes_of(statuses)
        arrays["state"][rows] = np.where(codes == 0, arrays["state"][rows], codes)
        for name, column in zip(names[3:], columns, strict=True):
            words = self._words.get(name)
            arrays[name][rows] = np.array(column, np.float64) if words is None else words.codes_of(column)
        self.errors.update((number, error) for number, error in zip(mine, errors, strict=True) if error)

    def _fingerprint(self, number: int) -> tuple[Any, ...]:
        facts = tuple(float(self._arrays[name][number]) for name in ("state", "strategy", "seconds", "ended"))
        present = sum(not math.isnan(column[number]) for column in self._params.values())
        return tuple("nan" if math.isnan(fact) else fact for fact in facts), present

    def _stamp(self, numbers: Iterable[int], before: dict[int, tuple[Any, ...]]) -> None:
        changed = [n for n in numbers if n not in before or before[n] != self._fingerprint(n)]
        if changed:
            self.version += 1
            self._arrays["changed"][changed] = self.version

    def _grow(self, size: int) -> None:
        room = len(self._values)
        if size <= room:
            return
        more = max(size, 2 * room) - room
        self._values = np.vstack([self._values, np.full((more, self._values.shape[1]), np.nan)])
        for columns in (self._arrays, self._params):
            for name, column in columns.items():
                missing = np.nan if column.dtype.kind == "f" else 0
                columns[name] = np.concatenate([column, np.full(more, missing, column.dtype)])


def _fetched(connection: Connection, query: Select[Any]) -> list[Any]:
    """Return all rows in the driver's form: conversion by SQLAlchemy would double the time."""
    with connection.execute(query) as result:
        return list(result if result.cursor is None else result.cursor.fetchall())


def _joined(columns: Sequence[ColumnElement[Any]], table: Table) -> Select[Any]:
    return select(*columns).join_from(TRIALS, table, TRIALS.c.trial_id == table.c.trial_id)


def _seconds(moments: Moments) -> Floats:
    """Convert stored times (UTC without a zone, text in SQLite) to seconds since 1970; NaN for None."""
    stamps = np.array(moments, dtype="datetime64[us]")
    return np.where(np.isnat(stamps), np.nan, stamps.astype(np.int64) / 1e6)
