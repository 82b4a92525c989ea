"""Importances computed from columns equal those of Optuna's own evaluator."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import optuna
import pytest

from hydra_tune.dashboard import importances as module
from hydra_tune.dashboard.importances import importances
from hydra_tune.storage import open_storage
from hydra_tune.storage.columns import StudyColumns


def _study(tmp_path: Path, directions: list[str], trials: int) -> optuna.Study:
    """Every kind of parameter; `deep` and `width` are there in some trials only, and some trials have no value."""
    chance = random.Random(3)

    def objective(trial: optuna.Trial) -> list[float]:
        x = trial.suggest_float("x", -2, 2)
        lr = trial.suggest_float("lr", 1e-5, 1, log=True)
        found = x * x + abs(lr - 1e-2) + chance.gauss(0, 0.1)
        found += trial.suggest_int("depth", 1, 9, step=2) / 10
        found += trial.suggest_float("stepped", 0, 1, step=0.25)
        found += {"a": 0.0, "b": 1.0, "c": 0.2}[trial.suggest_categorical("kind", ["a", "b", "c"])]
        trial.suggest_int("fixed", 3, 3)
        if trial.suggest_categorical("deep", [True, False]):
            found += trial.suggest_int("width", 1, 500, log=True) / 400
        if trial.number % 11 == 10:
            raise optuna.TrialPruned
        if trial.number % 13 == 12:
            return [float("inf")] * len(directions)
        return [found, *([x + chance.gauss(0, 0.1)] * (len(directions) - 1))]

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = open_storage(f"sqlite:///{tmp_path}/studies.db")
    sampler = optuna.samplers.RandomSampler(seed=5)
    study = optuna.create_study(directions=directions, storage=storage, sampler=sampler)
    with storage.batching():
        study.optimize(objective, n_trials=trials)
    return study


def _columns(study: optuna.Study) -> StudyColumns:
    with study._storage.reading() as connection:  # type: ignore[attr-defined]
        return StudyColumns(connection, study._study_id, has_hydra_tables=True)


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_they_are_those_of_optuna(tmp_path: Path, direction: str) -> None:
    study = _study(tmp_path, [direction], 400)
    found = importances(_columns(study))
    sign = 1 if direction == "minimize" else -1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        theirs = evaluator.evaluate(study, target=lambda trial: sign * trial.value)
    total = sum(theirs.values())
    assert found.shares == pytest.approx({name: value / total for name, value in theirs.items()}, abs=1e-9)
    assert list(found.shares.values()) == sorted(found.shares.values(), reverse=True)
    assert found.shares["x"] > 0.1
    assert found.shares["fixed"] == 0
    finite = [trial for trial in study.get_trials() if trial.values and trial.value != float("inf")]
    assert found.trials == len(finite) < 400
    study._storage.close()  # type: ignore[attr-defined]


def test_with_several_objectives_the_best_are_taken_front_by_front(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = _study(tmp_path, ["minimize", "maximize"], 300)
    columns = _columns(study)
    found = importances(columns)
    assert sum(found.shares.values()) == pytest.approx(1)
    assert next(iter(found.shares)) == "x"
    monkeypatch.setattr(module, "MOST_OF_SEVERAL_OBJECTIVES", 100)
    fewer = importances(columns)
    assert fewer.trials == 100
    assert sum(fewer.shares.values()) == pytest.approx(1)
    study._storage.close()  # type: ignore[attr-defined]


def test_of_a_few_trials_nothing_is_said(tmp_path: Path) -> None:
    study = _study(tmp_path, ["minimize"], 3)
    assert importances(_columns(study)) == module.Importances({}, 3)
    study._storage.close()  # type: ignore[attr-defined]
