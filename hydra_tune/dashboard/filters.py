"""Parses the filter above the leaderboard, and sorts trials.

    state:failed                trials in a state
    lr<0.01  depth>=3           a parameter, the value (by its metric's name or as `value`), seconds, number, memory, …
    activation=relu             a category; strategy=shard and device=cpu:0 work alike
    "out of room"               words in a trial's error

Terms are separated by spaces; a trial must match all of them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hydra_tune.core.errors import InputError, nearest, quoted
from hydra_tune.storage.columns import StudyColumns

Mask = NDArray[np.bool_]

WORDS = ("state", "strategy", "device")
NUMBERS = {
    "seconds": "seconds", "memory": "peak_device_bytes", "shards": "shards", "started": "started", "ended": "ended",
    "spilled": "spill_written_bytes", "communicated": "communicated_bytes",
}  # fmt: skip
_TERM = re.compile(r"(?P<name>[^<>=!:]+)(?P<how><=|>=|!=|=|<|>|:)(?P<value>.*)", re.DOTALL)


class BadFilter(InputError):
    """A filter or an order that cannot be parsed."""


def matching(columns: StudyColumns, metrics: Sequence[str], text: str) -> Mask:
    """Return the mask of trials that match a filter; raises BadFilter naming the invalid term."""
    mask = np.ones(columns.size, dtype=bool)
    for term in _terms(text):
        mask &= _one(columns, metrics, term)
    return mask


def ordered(columns: StudyColumns, metrics: Sequence[str], rows: NDArray[Any], sort: str, down: bool) -> NDArray[Any]:
    """Sort these trials by a column; trials without a value come last, ties are sorted by number."""
    if sort in WORDS:
        # Sort by the rank of each word: faster than sorting fifty thousand strings.
        _, keys = np.unique(columns.words(sort)[rows].astype(str), return_inverse=True)
        column = keys.astype(float)
    else:
        column = _numbers(columns, metrics, sort)[rows]
    key = -column if down else column
    key = np.where(np.isnan(column), np.inf, key)
    # An infinite value comes before a missing one.
    return np.asarray(rows[np.lexsort((rows, key, np.isnan(column)))])


def _terms(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BadFilter(f"filter {quoted(text)} cannot be read ({error})", "close the quotation mark") from error


def _one(columns: StudyColumns, metrics: Sequence[str], term: str) -> Mask:
    match = _TERM.fullmatch(term)
    if match is None:
        return _mentions(columns, term)
    name, how, value = match["name"].strip(), match["how"], match["value"].strip()
    if name in WORDS:
        wanted = value.lower()
        found = np.array([wanted in str(word).lower() for word in columns.words(name)], dtype=bool)
        return ~found if how == "!=" else found
    column = _numbers(columns, metrics, name)
    return _compare(column, how, _number(columns, name, value))


def _mentions(columns: StudyColumns, term: str) -> Mask:
    mask = np.zeros(columns.size, dtype=bool)
    if term.isascii() and term.isdigit() and int(term) < columns.size:
        mask[int(term)] = True
    wanted = term.lower()
    mask[[number for number, error in columns.errors.items() if wanted in error.lower()]] = True
    for name in WORDS:
        known = {word for word in set(columns.words(name)) if wanted in str(word).lower() and word}
        if known:
            mask |= np.isin(columns.words(name).astype(str), sorted(known))
    return mask


def _numbers(columns: StudyColumns, metrics: Sequence[str], name: str) -> NDArray[np.float64]:
    if name in columns.param_names:
        return columns.param(name)
    if name in metrics:
        return columns.values[:, metrics.index(name)]
    if name == "value":
        return columns.values[:, 0]
    if name == "number":
        return np.arange(columns.size, dtype=float)
    if name in NUMBERS:
        return columns.column(NUMBERS[name])
    known = [*columns.param_names, *metrics, "value", "number", *NUMBERS, *WORDS]
    raise BadFilter(f"trials have no {quoted(name)}", nearest(name, known))


def _number(columns: StudyColumns, name: str, value: str) -> float:
    choices = columns.choices(name) if name in columns.param_names else None
    if choices is not None:
        texts = [str(choice) for choice in choices]
        if value not in texts:
            raise BadFilter(f"{name} is never {quoted(value)}", nearest(value, texts))
        return float(texts.index(value))
    try:
        return float(value)
    except ValueError:
        raise BadFilter(f"{name} is compared with {quoted(value)}", "give a number") from None


def _compare(column: NDArray[np.float64], how: str, wanted: float) -> Mask:
    with np.errstate(invalid="ignore"):
        result: Mask = {
            "<": column < wanted, ">": column > wanted, "<=": column <= wanted, ">=": column >= wanted,
            "=": np.isclose(column, wanted, rtol=1e-9, atol=0) | (column == wanted), ":": column == wanted,
            "!=": (column != wanted) & ~np.isnan(column),
        }[how]  # fmt: skip
    return result
