"""The prediction target: the task of a target column, its classes or its numbers.

A column of text, of booleans, or of at most 20 distinct whole numbers is a classification, others a regression; a task
stated by the user is used as given, or refused if the column does not allow it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from hydra_tune.core.errors import SpecError, nearest, quoted
from hydra_tune.search_spaces.tables import MOST_NUMBERED_CLASSES, floats, is_numeric

if TYPE_CHECKING:
    import pandas as pd

FitTask: TypeAlias = Literal["binary", "multiclass", "regression"]
FIT_TASKS: tuple[FitTask, ...] = ("binary", "multiclass", "regression")

Label: TypeAlias = bool | int | float | str


@dataclass(frozen=True)
class Target:
    """A target column without its empty cells: class numbers, or numbers."""

    name: str
    task: FitTask
    values: np.ndarray
    labels: tuple[Label, ...] = ()
    """Classes in the order of their numbers."""


def make_target(column: pd.Series[Any], where: str, stated: str | None = None) -> Target:
    """Return the target of a column without empty cells."""
    name = str(column.name)
    if stated is not None and stated not in FIT_TASKS:
        raise SpecError(f"task cannot be {quoted(stated)}", nearest(str(stated), FIT_TASKS))
    task = stated if stated is not None else _inferred(column, where)
    if task == "regression":
        return Target(name, task, _numbers(column, where))
    labels, codes = _classes(column)
    if len(labels) < 2:
        raise SpecError(f"column {name!r} of {where} has one value only, {quoted(labels[0])}", "nothing to predict")
    if stated == "binary" and len(labels) > 2:
        raise SpecError(f"column {name!r} of {where} has {len(labels)} classes", "give --task multiclass")
    return Target(name, task, codes, tuple(labels))


def known_rows(column: pd.Series[Any], where: str) -> tuple[np.ndarray, list[str]]:
    """Return a mask of rows with a target, and notes on rows left out."""
    missing = column.isna().to_numpy()
    if is_numeric(column):
        missing = missing | ~np.isfinite(floats(column))
    if missing.all():
        raise SpecError(f"column {str(column.name)!r} of {where} has no values", "name another target")
    notes = [f"{int(missing.sum())} of {len(missing)} rows have no {column.name!r} and are left out"]
    return ~missing, notes if missing.any() else []


def labels_of(labels: tuple[Label, ...], codes: np.ndarray) -> np.ndarray:
    """Return the labels of class numbers, in their original type."""
    kinds = {type(label) for label in labels}
    values = np.array(labels, dtype=None if len(kinds) == 1 and str not in kinds else object)
    return np.asarray(values[codes])


def codes_of(labels: tuple[Label, ...], column: pd.Series[Any], where: str) -> np.ndarray:
    """Return the class numbers of a column of labels; raise SpecError for an unknown label."""
    numbers = {str(label): code for code, label in enumerate(labels)}
    texts = [str(_plain(value)) for value in column.tolist()]
    for text in texts:
        if text not in numbers:
            raise SpecError(f"column {str(column.name)!r} of {where} has the new class {quoted(text)}", "leave it out")
    return np.array([numbers[text] for text in texts])


def _inferred(column: pd.Series[Any], where: str) -> FitTask:
    different = int(column.nunique())
    if not is_numeric(column) or str(column.dtype).startswith("bool"):
        if different > 2 and different > len(column) / 2:
            raise SpecError(
                f"column {str(column.name)!r} of {where} has {different} classes in {len(column)} rows",
                "name another target, or clean the column where it should hold numbers",
            )
        return "binary" if different <= 2 else "multiclass"
    values = floats(column)
    whole = bool((values == np.round(values)).all())
    if different <= 2 and (whole or len(column) > 2):
        return "binary"
    few = whole and different <= MOST_NUMBERED_CLASSES and different <= len(column) / 2
    return "multiclass" if few else "regression"


def _numbers(column: pd.Series[Any], where: str) -> np.ndarray:
    import pandas as pd

    numbers = pd.to_numeric(column, errors="coerce")
    junk = numbers.isna().to_numpy()
    if junk.any():
        value = column.iloc[int(junk.argmax())]
        raise SpecError(f"column {str(column.name)!r} of {where} holds {quoted(value)}", "a regression needs numbers")
    values = floats(numbers)
    if np.ptp(values) == 0:
        raise SpecError(
            f"column {str(column.name)!r} of {where} has one value only, {values[0]:g}", "nothing to predict"
        )
    return values


def _classes(column: pd.Series[Any]) -> tuple[list[Label], np.ndarray]:
    """Return the classes, sorted, and the class number of each row."""
    texts = column.map(lambda value: str(_plain(value)))
    first = {
        text: _plain(value) for text, value in zip(reversed(texts.tolist()), reversed(column.tolist()), strict=True)
    }
    numeric = all(isinstance(label, int | float) for label in first.values())
    ordered = sorted(first, key=(lambda text: first[text]) if numeric else str)
    number = {text: code for code, text in enumerate(ordered)}
    return [first[text] for text in ordered], np.array([number[text] for text in texts])


def _plain(value: Any) -> Label:
    """Return a label as JSON can store it; 1.0 becomes 1, since whole numbers with gaps are read as floats."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, bool | int | float | str) else str(value)
