"""Parameter importance for being among the best tenth: PED-ANOVA (arXiv 2304.10255), from columns of trials.

Gives the same numbers as Optuna's PedAnovaImportanceEvaluator, conditional parameters included (arXiv 2601.20800), in
milliseconds for fifty thousand trials: it counts values on a grid instead of making a trial object of each row, and
does not import scikit-learn, which takes seconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from hydra_tune.dashboard.charts import Rows, pareto_front
from hydra_tune.storage.columns import Floats, Ints, StudyColumns

BEST = 0.1
"""Share of the trials that count as the best."""
GRID = 50
PRIOR = 1.0
"""Weight of the prior, in trials."""
LEAST_TRIALS = 4
LEAST_WITH_PARAMETER = 2
MOST_OF_SEVERAL_OBJECTIVES = 1_000
"""Maximum number of trials with several objectives, which are compared pairwise; more are sampled evenly."""
_TINY = 1e-12
_erf = np.frompyfunc(math.erf, 1, 1)


@dataclass(frozen=True)
class Importances:
    """Shares that add up to 1, the most important parameter first; empty if they cannot be computed."""

    shares: dict[str, float]
    trials: int
    """Number of completed trials used."""


def importances(columns: StudyColumns) -> Importances:
    """Compute the importance of each parameter."""
    rows = np.flatnonzero(columns.complete)
    rows = rows[np.isfinite(columns.values[rows]).all(axis=1)]
    if len(columns.maximize) > 1 and len(rows) > MOST_OF_SEVERAL_OBJECTIVES:
        rows = rows[np.linspace(0, len(rows) - 1, MOST_OF_SEVERAL_OBJECTIVES).astype(int)]
    if len(rows) < LEAST_TRIALS:
        return Importances({}, len(rows))
    losses = columns.values[rows] * np.where(columns.maximize, -1.0, 1.0)
    best = _best(losses)
    found = {
        name: _importance(columns.param(name)[rows], columns.distributions[name], best) for name in columns.param_names
    }
    total = sum(found.values())
    ranked = sorted(found, key=lambda name: -found[name]) if total > 0 else []
    return Importances({name: found[name] / total for name in ranked}, len(rows))


def _best(losses: Floats) -> NDArray[np.bool_]:
    """Return the mask of the best tenth; with several objectives front by front, evenly from the last one."""
    wanted = math.ceil(BEST * len(losses))
    if losses.shape[1] == 1:
        return np.asarray(losses[:, 0] <= np.partition(losses[:, 0], wanted - 1)[wanted - 1])
    best = np.zeros(len(losses), bool)
    left: Rows = np.arange(len(losses))
    while (missing := wanted - int(best.sum())) > 0:
        front = left[pareto_front(losses[left])]
        if len(front) > missing:
            along = front[np.argsort(losses[front, 0], kind="stable")]
            front = along[np.linspace(0, len(along) - 1, missing).astype(int)]
        best[front] = True
        left = np.setdiff1d(left, front)
    return best


def _importance(values: Floats, distribution: BaseDistribution, best: NDArray[np.bool_]) -> float:
    """Return the distance of the parameter's distribution in the best trials from that in all trials that have it."""
    there = ~np.isnan(values)
    among_best = there & best
    if distribution.single() or there.sum() < LEAST_WITH_PARAMETER or not among_best.any():
        return 0.0
    everywhere = _density(_counts(values[there], distribution), distribution) + _TINY
    at_best = _density(_counts(values[among_best], distribution), distribution) + _TINY
    divergence = float(everywhere @ (at_best / everywhere - 1) ** 2)
    weight = (among_best.sum() / best.sum()) ** 2 / (there.sum() / len(values))
    return float(weight * divergence)


def _counts(values: Floats, distribution: BaseDistribution) -> Ints:
    """Return the count of each choice, or of each position on a grid over the range."""
    if isinstance(distribution, CategoricalDistribution):
        return np.bincount(values.astype(int), minlength=len(distribution.choices))
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    places = GRID
    if isinstance(distribution, IntDistribution) and distribution.log:
        places = min(math.ceil(math.log2(distribution.high - distribution.low + 1)) + 1, GRID)
    elif distribution.step is not None:
        places = min(round((distribution.high - distribution.low) / distribution.step) + 1, GRID)
    low, high = float(distribution.low), float(distribution.high)
    if distribution.log:
        low, high, values = math.log(low), math.log(high), np.log(values)
    nearest = np.ceil((values - low) / ((high - low) / (places - 1)) - 0.5).astype(int)
    return np.bincount(np.clip(nearest, 0, places - 1), minlength=places)


def _density(counts: Ints, distribution: BaseDistribution) -> Floats:
    """Return a smooth density on the grid: a kernel for each taken position, and the prior."""
    taken = np.flatnonzero(counts)
    weights = np.append(counts[taken], PRIOR)
    kernels = _choices if isinstance(distribution, CategoricalDistribution) else _normals
    return np.asarray(kernels(taken, counts) @ (weights / weights.sum()))


def _choices(taken: Rows, counts: Ints) -> Floats:
    kernels = np.full((len(counts), len(taken) + 1), PRIOR / (len(taken) + 1))
    kernels[taken, np.arange(len(taken))] += 1
    return np.asarray(kernels / kernels.sum(axis=0))


def _normals(taken: Rows, counts: Ints) -> Floats:
    """Return normal kernels truncated to the range, with Scott's bandwidth; the last one is the prior."""
    last = len(counts) - 1
    weights = counts[taken]
    total = weights.sum()
    mean = taken @ weights / total
    spread = math.sqrt((taken - mean) ** 2 @ weights / max(1, total - 1))
    cumulated = np.cumsum(weights)
    first = np.searchsorted(cumulated, total // 4, side="left")
    third = min(len(taken) - 1, int(np.searchsorted(cumulated, total * 3 // 4, side="right")))
    width = 1.059 * min((taken[third] - taken[first]) / 1.34, spread) * total**-0.2
    centres = np.append(taken, last / 2)
    # At least wide enough for nine tenths of a kernel to lie within its position.
    widths = np.append(np.full(len(taken), max(width, 0.5 / 1.64)), last + 1.0)
    edges = np.arange(last + 2) - 0.5
    below = 0.5 + 0.5 * _erf((edges[:, np.newaxis] - centres) / widths / math.sqrt(2)).astype(float)
    return np.asarray(np.diff(below, axis=0) / (below[-1] - below[0]))
