"""Greedy ensemble selection (Caruana et al. 2004): choose models to average, and their weights.

Pure: predictions in, weights out. Starting with the best model, the model that helps most is added repeatedly, possibly
the same one several times; the best set found is the ensemble, kept only if it beats the best model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from hydra_tune.automl.scores import Score

ROUNDS = 40
LEAST_GAIN = 1e-9


def select(
    truth: np.ndarray, predictions: Mapping[int, np.ndarray], score: Score, smooth: Score, rounds: int = ROUNDS
) -> dict[int, float]:
    """Return the weight of each chosen model, by its number; weights add up to 1.

    `smooth` breaks ties between sets with the same score: accuracy has few distinct values on a small table.
    """
    if not predictions:
        raise ValueError("there are no predictions to choose from")

    def judged(predicted: np.ndarray) -> tuple[float, float]:
        return score.loss(truth, predicted), smooth.loss(truth, predicted)

    alone = {number: judged(predicted) for number, predicted in predictions.items()}
    first = min(alone, key=lambda number: (alone[number], number))
    chosen, total = [first], predictions[first].copy()
    best, best_size = alone[first], 1
    for _ in range(rounds - 1):
        tried = {n: judged((total + predicted) / (len(chosen) + 1)) for n, predicted in predictions.items()}
        added = min(tried, key=lambda number: (tried[number], number))
        chosen.append(added)
        total = total + predictions[added]
        if _better(tried[added], best):
            best, best_size = tried[added], len(chosen)
    counts = Counter(chosen[:best_size])
    return {number: count / best_size for number, count in counts.items()}


def _better(one: tuple[float, float], other: tuple[float, float]) -> bool:
    if abs(one[0] - other[0]) > LEAST_GAIN:
        return one[0] < other[0]
    return one[1] < other[1] - LEAST_GAIN


def average(predictions: Mapping[int, np.ndarray], weights: Mapping[int, float]) -> np.ndarray:
    """Return the weighted mean of some models' predictions."""
    return np.asarray(np.sum([weight * predictions[number] for number, weight in weights.items()], axis=0))
