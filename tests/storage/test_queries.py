"""Studies and trials as the command line reads them, whichever program made them."""

import math

import optuna
import pytest
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial

from hydra_tune.core.errors import StorageError
from hydra_tune.storage import HydraStorage, StudyRecords, open_storage
from hydra_tune.storage.queries import (
    list_studies,
    study_summary,
    trial_attempts,
    trial_metrics,
    trial_records,
    trial_units,
)


@pytest.mark.parametrize("direction", [StudyDirection.MINIMIZE, StudyDirection.MAXIMIZE])
@pytest.mark.parametrize(
    "values", [[3.0, 1.0, 2.0], [1.0, math.inf, 0.5], [-math.inf, 1.0], [math.inf], [2.0, 2.0], []]
)
def test_the_best_of_a_summary_is_optunas_best(storage: HydraStorage, direction: StudyDirection, values: list[float]):
    study_id = storage.create_new_study([direction], "s")
    storage.create_new_trial(study_id)
    for value in values:
        storage.create_new_trial(study_id, create_trial(value=value))
    found = study_summary(storage, "s")
    if values:
        best = storage.get_best_trial(study_id)
        assert (found.best_value, found.best_number) == (best.value, best.number)
    else:
        assert (found.best_value, found.best_number) == (None, None)


def test_a_summary_counts_trials_by_our_state_or_optunas(storage: HydraStorage):
    study_id = storage.create_new_study([StudyDirection.MAXIMIZE], "s")
    other = storage.create_new_study([StudyDirection.MINIMIZE, StudyDirection.MAXIMIZE], "other")
    records = StudyRecords(storage, study_id)
    with storage.batching():
        for status, state in [("DIVERGED", "PRUNED"), ("COMPLETE", "COMPLETE"), (None, "PRUNED")]:
            trial = create_trial(state=TrialState[state], value=1.0 if state == "COMPLETE" else None)
            trial_id = storage.create_new_trial(study_id, trial)
            if status:
                records.trial(storage.get_trial_number_from_id(trial_id), status=status)
        storage.create_new_trial(other, create_trial(values=[1.0, 2.0]))
        first, second = list_studies(storage)
    assert first.trials == {"DIVERGED": 1, "COMPLETE": 1, "PRUNED": 1}
    assert (first.name, first.study_id, first.directions) == ("s", study_id, ("maximize",))
    assert (second.trials, second.directions) == ({"COMPLETE": 1}, ("minimize", "maximize"))
    assert (second.best_value, second.best_number) == (None, None)
    (record,) = trial_records(storage, "other")
    assert (record.value, record.values) == (None, (1.0, 2.0))


def test_an_unknown_study_is_told_with_the_nearest(storage: HydraStorage):
    with pytest.raises(StorageError, match="no studies yet"):
        study_summary(storage, "digits")
    storage.create_new_study([StudyDirection.MINIMIZE], "digits-mlp")
    storage.create_new_study([StudyDirection.MINIMIZE], "other")
    for query in (study_summary, trial_records, trial_units):
        with pytest.raises(StorageError, match=r"no study is named 'digit-mlp' \(did you mean 'digits-mlp'"):
            query(storage, "digit-mlp")
    for query in (trial_attempts, trial_metrics):
        with pytest.raises(StorageError, match="did you mean"):
            query(storage, "digit-mlp", 0)


def test_studies_of_plain_optuna_are_listed_without_our_tables(sqlite_url: str):
    plain = optuna.storages.RDBStorage(sqlite_url)
    study = optuna.create_study(study_name="plain", storage=plain, direction="maximize")
    study.optimize(lambda trial: trial.suggest_int("x", 1, 3), n_trials=3)
    plain.remove_session()
    plain.engine.dispose()
    with open_storage(sqlite_url, read_only=True) as storage:
        assert not storage.has_hydra_tables
        (found,) = list_studies(storage)
        assert (found.name, found.trials, found.best_value) == ("plain", {"COMPLETE": 3}, study.best_value)
        assert (found.created, found.seed, found.settings, found.spec, found.metrics) == (
            None,
            None,
            {},
            None,
            ("value",),
        )
        records = trial_records(storage, "plain")
        assert [record.params for record in records] == [trial.params for trial in study.trials]
        assert {record.state for record in records} == {"COMPLETE"}
        assert trial_attempts(storage, "plain", 0) == []
        assert trial_metrics(storage, "plain", 0) == {}
        assert trial_units(storage, "plain") == []


def test_listing_loads_no_trials(storage: HydraStorage):
    study_id = storage.create_new_study([StudyDirection.MINIMIZE], "s")
    storage.create_new_trial(study_id)
    with open_storage(storage.url, read_only=True) as reader:
        assert list_studies(reader)[0].trials == {"RUNNING": 1}
        assert reader._cache._studies == {}
