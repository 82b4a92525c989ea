"""Objectives in the shape of Optuna's examples: the same calls, small data. The command line runs each of them."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import optuna
import optuna.artifacts
import optuna.terminator

from tests.optuna import integrations


def quadratic(trial: optuna.Trial) -> float:
    x = trial.suggest_float("x", -100, 100)
    y = trial.suggest_categorical("y", [-1, 0, 1])
    return x**2 + y


def sklearn_simple(trial: optuna.Trial) -> float:
    """A classifier is chosen first; its parameters depend on it."""
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.model_selection import cross_val_score
    from sklearn.svm import SVC

    rows, labels = integrations.data()
    if trial.suggest_categorical("classifier", ["SVC", "RandomForest"]) == "SVC":
        model = SVC(C=trial.suggest_float("svc_c", 1e-3, 1e3, log=True), gamma="auto")
    else:
        model = RandomForestClassifier(max_depth=trial.suggest_int("rf_max_depth", 2, 8, log=True), n_estimators=5)
    return float(cross_val_score(model, rows, labels, n_jobs=1, cv=3).mean())


def sklearn_pruned(trial: optuna.Trial) -> float:
    from sklearn.linear_model import SGDClassifier

    rows, labels = integrations.data()
    model = SGDClassifier(alpha=trial.suggest_float("alpha", 1e-5, 1e-1, log=True), random_state=0)
    for step in range(10):
        model.partial_fit(rows[:80], labels[:80], classes=[0, 1])
        trial.report(1.0 - model.score(rows[80:], labels[80:]), step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return float(1.0 - model.score(rows[80:], labels[80:]))


def boosted(trial: optuna.Trial) -> float:
    """Parameters that only some boosters have."""
    import xgboost

    rows, labels = integrations.data()
    params: dict[str, Any] = {"objective": "binary:logistic", "nthread": 1, "verbosity": 0}
    params["booster"] = trial.suggest_categorical("booster", ["gbtree", "gblinear", "dart"])
    params["lambda"] = trial.suggest_float("lambda", 1e-8, 1.0, log=True)
    if params["booster"] in ("gbtree", "dart"):
        params["max_depth"] = trial.suggest_int("max_depth", 3, 9, step=2)
        params["eta"] = trial.suggest_float("eta", 1e-8, 1.0, log=True)
    if params["booster"] == "dart":
        params["rate_drop"] = trial.suggest_float("rate_drop", 1e-8, 1.0, log=True)
    model = xgboost.train(params, xgboost.DMatrix(rows[:80], labels[:80]), 3)
    return float(((model.predict(xgboost.DMatrix(rows[80:])) > 0.5) == labels[80:]).mean())


def torch_layers(trial: optuna.Trial) -> float:
    """Layers in a loop, an optimizer by name, and pruning by the accuracy of each epoch."""
    import torch
    from torch import nn

    rows, labels = (torch.tensor(each) for each in integrations.data())
    layers: list[nn.Module] = []
    width = 4
    for i in range(trial.suggest_int("n_layers", 1, 3)):
        out = trial.suggest_int(f"n_units_l{i}", 4, 16)
        layers += [nn.Linear(width, out), nn.ReLU(), nn.Dropout(trial.suggest_float(f"dropout_l{i}", 0.2, 0.5))]
        width = out
    model = nn.Sequential(*layers, nn.Linear(width, 2), nn.LogSoftmax(dim=1))
    name = trial.suggest_categorical("optimizer", ["Adam", "RMSprop", "SGD"])
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=trial.suggest_float("lr", 1e-5, 1e-1, log=True))
    for epoch in range(3):
        optimizer.zero_grad()
        nn.functional.nll_loss(model(rows), labels).backward()
        optimizer.step()
        accuracy = (model(rows).argmax(1) == labels).float().mean().item()
        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.exceptions.TrialPruned
    return accuracy


def two_objectives(trial: optuna.Trial) -> tuple[float, float]:
    x, y = trial.suggest_float("x", 0, 5), trial.suggest_float("y", 0, 3)
    return 4 * x**2 + 4 * y**2, (x - 5) ** 2 + (y - 5) ** 2


def constrained(trial: optuna.Trial) -> float:
    x, y = trial.suggest_float("x", -15, 30), trial.suggest_float("y", -15, 30)
    trial.set_constraint("inside", (x - 5) ** 2 + y**2 - 25)
    trial.set_constraint("outside", -((x - 8) ** 2) - (y + 3) ** 2 + 7.7)
    return 4 * x**2 + 4 * y**2


def cross_validated(trial: optuna.Trial) -> float:
    from sklearn.model_selection import cross_val_score
    from sklearn.tree import DecisionTreeClassifier

    model = DecisionTreeClassifier(max_depth=trial.suggest_int("max_depth", 1, 8), random_state=0)
    scores = cross_val_score(model, *integrations.data(), cv=3)
    optuna.terminator.report_cross_validation_scores(trial, list(scores))
    return float(np.mean(scores))


def with_artifact(trial: optuna.Trial) -> float:
    """The model's file goes to an artifact store, and its id to the trial."""
    os.makedirs("artifacts", exist_ok=True)
    store = optuna.artifacts.FileSystemArtifactStore(base_path="artifacts")
    path = f"model-{trial.number}.txt"
    with open(path, "w") as file:
        file.write(f"trial {trial.number}")
    artifact_id = optuna.artifacts.upload_artifact(artifact_store=store, file_path=path, study_or_trial=trial)
    trial.set_user_attr("artifact_id", artifact_id)
    return trial.suggest_float("x", 0, 1)


class Objective:
    """An objective with arguments of its own."""

    def __init__(self, shift: float) -> None:
        self.shift = shift

    def __call__(self, trial: optuna.Trial) -> float:
        return (trial.suggest_float("x", -1, 1) - self.shift) ** 2


shifted = Objective(0.5)


def stops_when_good(trial: optuna.Trial) -> float:
    if trial.number == 2:
        trial.study.stop()
    return trial.suggest_float("x", 0, 1)


def goes_on_from_the_best(trial: optuna.Trial) -> float:
    """A range around the best value so far, as in examples that look at the study."""
    try:
        centre = trial.study.best_params["x"]
    except ValueError:
        centre = 0.0
    trial.set_user_attr("centre", centre)
    return (trial.suggest_float("x", -2, 2) - 1) ** 2


class SimulatedAnnealing(optuna.samplers.BaseSampler):
    """A sampler of the user's own: neighbours of the current trial, which a worse one replaces now and then."""

    def __init__(self, temperature: float = 10.0, seed: int | None = None) -> None:
        self._rng = np.random.default_rng(seed)
        self._independent = optuna.samplers.RandomSampler(seed=seed)
        self._temperature = temperature
        self._current: optuna.trial.FrozenTrial | None = None

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        return dict(optuna.search_space.intersection_search_space(study.get_trials(deepcopy=False)))

    def sample_relative(self, study: Any, trial: Any, search_space: dict[str, Any]) -> dict[str, Any]:
        done = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
        if not search_space or not done:
            return {}
        last, now = done[-1], self._current
        if now is None or self._rng.uniform() < math.exp(min(0.0, now.value - last.value) / self._temperature):
            self._current = last
        self._temperature *= 0.9
        centre = (self._current or last).params
        return {
            name: float(np.clip(centre[name] + self._rng.uniform(-1, 1), each.low, each.high))
            for name, each in search_space.items()
        }

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        return self._independent.sample_independent(study, trial, name, distribution)


lightgbm_pruned, xgboost_pruned = integrations.lightgbm, integrations.xgboost
search_cv, lightning = integrations.sklearn, integrations.lightning
ignite, skorch = integrations.ignite, integrations.skorch
