"""Chart data of a study: pure functions from columns of trials to a number of points that can be drawn."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hydra_tune.storage.columns import StudyColumns

Rows = NDArray[np.intp]


def best_trial(columns: StudyColumns) -> int | None:
    """Return the best completed trial; None if there is none, or several objectives."""
    if len(columns.maximize) != 1:
        return None
    rows = np.flatnonzero(columns.complete)
    if not len(rows):
        return None
    values = columns.values[rows, 0]
    return int(rows[np.argmax(values) if columns.maximize[0] else np.argmin(values)])


def records(columns: StudyColumns, objective: int = 0) -> Rows:
    """Return the completed trials that were better than all before them."""
    rows = np.flatnonzero(columns.complete)
    if not len(rows):
        return rows
    values = columns.values[rows, objective]
    values = values if columns.maximize[objective] else -values
    before = np.concatenate([[-np.inf], np.maximum.accumulate(values)[:-1]])
    return np.asarray(rows[values > before])


def sample(columns: StudyColumns, limit: int, *, keep: Iterable[int] = ()) -> Rows:
    """Return about `limit` completed trials at most: the best tenth of the limit, and the others evenly by number."""
    rows = np.flatnonzero(columns.complete)
    if len(rows) <= limit:
        return rows
    order = np.argsort(columns.values[rows, 0], kind="stable")
    best = rows[order[::-1] if columns.maximize[0] else order][: limit // 10]
    even = rows[np.linspace(0, len(rows) - 1, limit - len(best)).astype(int)]
    return np.unique(np.concatenate([best, even, np.fromiter(keep, dtype=np.intp)]))


def best_trials(columns: StudyColumns) -> Rows:
    """Return the Pareto front of the completed trials."""
    rows = np.flatnonzero(columns.complete)
    return np.asarray(rows[pareto_front(columns.values[rows] * np.where(columns.maximize, -1.0, 1.0))])


def pareto_front(losses: NDArray[np.float64]) -> Rows:
    """Return the rows that no other row dominates: at most as large everywhere, and smaller in one column."""
    order = np.lexsort(losses.T[::-1])
    front: list[int] = []
    kept = np.empty((0, losses.shape[1]))
    for index in order:
        # Sorted by the first objective, no later point can dominate an earlier one.
        point = losses[index]
        dominated = (kept <= point).all(axis=1) & (kept < point).any(axis=1)
        if not dominated.any():
            front.append(int(index))
            kept = np.vstack([kept, point])
    return np.array(sorted(front), dtype=np.intp)


@dataclass(frozen=True)
class Failure:
    """Trials that ended for the same reason."""

    state: str
    reason: str
    numbers: list[int]
    count: int


def failures(columns: StudyColumns, examples: int = 20) -> list[Failure]:
    """Return the reasons for which trials ended without a value, most frequent first, ignoring numbers in them."""
    alike: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for number, error in columns.errors.items():
        alike[columns.word("state", number), re.sub(r"\d+(\.\d+)?", "#", error)].append(number)
    found = [
        Failure(state, columns.errors[min(numbers)], sorted(numbers)[:examples], len(numbers))
        for (state, _), numbers in alike.items()
    ]
    return sorted(found, key=lambda failure: (-failure.count, failure.reason))


def busy_shares(spans: Iterable[tuple[float, float]], start: float, end: float, bins: int) -> list[float]:
    """Return the share of each time bin covered by the spans (start, seconds), which hardly overlap."""
    width = (end - start) / bins
    busy = np.zeros(bins)
    for began, seconds in spans:
        first, last = max(began, start), min(began + seconds, end)
        if last <= first:
            continue
        i, j = int((first - start) / width), min(int((last - start) / width), bins - 1)
        if i >= j:
            busy[min(i, bins - 1)] += last - first
            continue
        busy[i] += start + (i + 1) * width - first
        busy[i + 1 : j] += width
        busy[j] += last - (start + j * width)
    return [float(share) for share in np.minimum(busy / width, 1.0)]


def plain(value: Any) -> Any:
    """Convert a value to plain JSON data; non-finite numbers become words."""
    if isinstance(value, float | np.floating):
        number = float(value)
        return number if np.isfinite(number) else "nan" if np.isnan(number) else "inf" if number > 0 else "-inf"
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)
