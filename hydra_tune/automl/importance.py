"""Permutation importance: how much worse a model gets if one column is shuffled among the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hydra_tune.automl.encoder import origins
from hydra_tune.automl.prepared import Prepared
from hydra_tune.automl.scores import Score


@dataclass(frozen=True)
class Importance:
    """The importance of a column: mean and spread of the score's loss over repeats."""

    column: str
    importance: float
    spread: float


def permuted_importance(
    prepared: Prepared,
    rows: np.ndarray,
    truth: np.ndarray,
    predict: Callable[[np.ndarray], np.ndarray],
    score: Score,
    repeats: int,
    seed: int,
) -> list[Importance]:
    """Return the importance of each column of a table, given its encoded rows (rows, folds, width)."""
    assert prepared.schema is not None
    random = np.random.default_rng(seed)
    before = score.loss(truth, predict(rows))
    found = []
    for column, places in origins(prepared.schema, prepared.layout).items():
        worse = []
        for _ in range(repeats):
            shuffled = rows.copy()
            shuffled[:, :, places] = rows[random.permutation(len(rows))][:, :, places]
            worse.append(score.loss(truth, predict(shuffled)) - before)
        found.append(Importance(column, float(np.mean(worse)), float(np.std(worse))))
    return sorted(found, key=lambda each: -each.importance)
