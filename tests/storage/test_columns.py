"""Columns of trials equal Optuna's own data of each trial, in whatever steps they are refreshed."""

from __future__ import annotations

import math

import numpy as np
import optuna
import pytest

from hydra_tune.storage import HydraStorage, StudyRecords, open_storage
from hydra_tune.storage.columns import StudyColumns


def _read(storage: HydraStorage, study: optuna.Study) -> StudyColumns:
    with storage.reading() as connection:
        return StudyColumns(connection, study._study_id, storage.has_hydra_tables)


def _refresh(storage: HydraStorage, columns: StudyColumns) -> None:
    with storage.reading() as connection:
        columns.refresh(connection)


def _objective(trial: optuna.Trial) -> float:
    x = trial.suggest_float("x", -1, 1)
    if trial.suggest_categorical("more", [True, False]):
        x += trial.suggest_int("steps", 1, 8)
    if trial.number % 7 == 3:
        raise optuna.TrialPruned
    if trial.number % 7 == 5:
        raise RuntimeError("no")
    return math.inf if trial.number % 7 == 6 else x


def _same(columns: StudyColumns, study: optuna.Study) -> None:
    trials = study.get_trials(deepcopy=False)
    assert columns.size == len(trials)
    for trial in trials:
        assert columns.word("state", trial.number) == trial.state.name
        assert columns.params(trial.number) == trial.params
        value = columns.values[trial.number, 0]
        assert (None if math.isnan(value) else value) == (trial.values[0] if trial.values else None)
        assert columns.ids[trial.number] == trial._trial_id
    assert sum(columns.counts().values()) == len(trials)
    assert int(columns.complete.sum()) == sum(trial.state.name == "COMPLETE" for trial in trials)


def test_columns_say_what_optuna_says_whenever_they_are_read(sqlite_storage: HydraStorage) -> None:
    study = optuna.create_study(storage=sqlite_storage, sampler=optuna.samplers.RandomSampler(0))
    columns = _read(sqlite_storage, study)
    assert columns.size == 0
    # More than the arrays have room for at first.
    for some in (1, 30, 260):
        study.optimize(_objective, n_trials=some, catch=(RuntimeError,))
        _refresh(sqlite_storage, columns)
        _same(columns, study)
    assert columns.param_names == ["x", "more", "steps"]
    again = _read(sqlite_storage, study)
    assert np.array_equal(again.values, columns.values, equal_nan=True)


def test_only_what_changed_is_marked(sqlite_storage: HydraStorage) -> None:
    study = optuna.create_study(storage=sqlite_storage)
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=3)
    running = study.ask()
    columns = _read(sqlite_storage, study)
    version = columns.version
    _refresh(sqlite_storage, columns)
    assert columns.version == version
    running.suggest_float("x", 0, 1)
    _refresh(sqlite_storage, columns)
    assert np.flatnonzero(columns.changed > version).tolist() == [3]
    version = columns.version
    study.tell(running, 1.0)
    study.ask()
    _refresh(sqlite_storage, columns)
    assert np.flatnonzero(columns.changed > version).tolist() == [3, 4]
    _same(columns, study)


def test_our_own_records_say_more(sqlite_storage: HydraStorage) -> None:
    study = optuna.create_study(storage=sqlite_storage)
    study.optimize(lambda trial: 1.0, n_trials=2)
    records = StudyRecords(sqlite_storage, study._study_id)
    records.trial(1, status="DIVERGED", strategy="shard", shards=3, seconds=2.5, error="loss is nan", device="cpu:0")
    columns = _read(sqlite_storage, study)
    assert [columns.word("state", n) for n in (0, 1)] == ["COMPLETE", "DIVERGED"]
    assert columns.errors == {1: "loss is nan"}
    assert (columns.column("shards")[1], columns.column("seconds")[1]) == (3, 2.5)
    assert math.isnan(columns.column("seconds")[0])


def test_a_study_that_is_gone_or_another_is_noticed(sqlite_storage: HydraStorage) -> None:
    study = optuna.create_study(study_name="first", storage=sqlite_storage)
    study.optimize(lambda trial: 1.0, n_trials=2)
    columns = _read(sqlite_storage, study)
    optuna.delete_study(study_name="first", storage=sqlite_storage)
    with open_storage(sqlite_storage.url, read_only=True) as reading:
        with pytest.raises(KeyError):
            _refresh(reading, columns)
        optuna.create_study(study_name="second", storage=sqlite_storage)
        with pytest.raises(KeyError):
            _refresh(reading, columns)
