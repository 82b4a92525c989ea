"""Metrics of predictions for each task, by name, and the objective that trials minimise for each.

Trials are evaluated at every epoch by a mean over rows (`log_loss`, `mse` or `mae`); leaderboard and ensemble by the
metric itself, on predictions for rows that a model has not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hydra_tune.automl.target import FitTask
from hydra_tune.core.errors import SpecError, nearest, quoted


@dataclass(frozen=True)
class Score:
    """A metric of predictions: class probabilities, shape (rows, classes), or numbers."""

    name: str
    function: Callable[[np.ndarray, np.ndarray], float]
    greater_is_better: bool
    objective: str
    """Name of the objective that trials minimise."""

    def __call__(self, truth: np.ndarray, predicted: np.ndarray) -> float:
        return float(self.function(truth, predicted))

    def loss(self, truth: np.ndarray, predicted: np.ndarray) -> float:
        """Return the metric, negated if greater is better."""
        value = self(truth, predicted)
        return -value if self.greater_is_better else value


def roc_auc(truth: np.ndarray, predicted: np.ndarray) -> float:
    """Return how often a row of the second class gets a higher probability than one of the first."""
    from sklearn.metrics import roc_auc_score

    if len(np.unique(truth)) < 2:
        raise SpecError("roc_auc needs rows of both classes", "give other rows, or another metric")
    return float(roc_auc_score(truth, predicted[:, 1]))


def log_loss(truth: np.ndarray, predicted: np.ndarray) -> float:
    """Return the mean negative log probability of the true class, in nats."""
    return float(-np.log(np.clip(predicted[np.arange(len(truth)), truth], 1e-7, 1.0)).mean())


def accuracy(truth: np.ndarray, predicted: np.ndarray) -> float:
    return float((predicted.argmax(axis=1) == truth).mean())


def balanced_accuracy(truth: np.ndarray, predicted: np.ndarray) -> float:
    """Return the mean over classes of the share of rows classified correctly."""
    right = predicted.argmax(axis=1) == truth
    return float(np.mean([right[truth == c].mean() for c in np.unique(truth)]))


def f1(truth: np.ndarray, predicted: np.ndarray) -> float:
    """Return F1 of the second class of two, or the mean over several classes."""
    from sklearn.metrics import f1_score

    average = "binary" if predicted.shape[1] == 2 else "macro"
    return float(f1_score(truth, predicted.argmax(axis=1), average=average, zero_division=0))


def rmse(truth: np.ndarray, predicted: np.ndarray) -> float:
    return float(np.sqrt(np.mean((truth - predicted) ** 2)))


def mae(truth: np.ndarray, predicted: np.ndarray) -> float:
    return float(np.mean(np.abs(truth - predicted)))


def r2(truth: np.ndarray, predicted: np.ndarray) -> float:
    """Return the share of variance explained."""
    total = float(np.mean((truth - truth.mean()) ** 2))
    return 1.0 - float(np.mean((truth - predicted) ** 2)) / total if total else 0.0


_CLASSES = (
    Score("accuracy", accuracy, True, "log_loss"),
    Score("log_loss", log_loss, False, "log_loss"),
    Score("balanced_accuracy", balanced_accuracy, True, "log_loss"),
    Score("f1", f1, True, "log_loss"),
)
SCORES: Mapping[FitTask, tuple[Score, ...]] = {
    "binary": (Score("roc_auc", roc_auc, True, "log_loss"), *_CLASSES),
    "multiclass": _CLASSES,
    "regression": (Score("rmse", rmse, False, "mse"), Score("mae", mae, False, "mae"), Score("r2", r2, True, "mse")),
}
"""Metrics of each task, the default first."""


def score_for(task: FitTask, name: str | None = None) -> Score:
    """Return the metric of that name, or the task's default."""
    known = {score.name: score for score in SCORES[task]}
    if name is None:
        return SCORES[task][0]
    if name not in known:
        raise SpecError(f"a {task} task has no metric {quoted(name)}", nearest(str(name), known))
    return known[name]
