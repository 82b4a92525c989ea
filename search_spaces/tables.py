"""Loads CSV and Parquet tables as data: finds the columns of numbers and categories, and the target.

An `Encoding` is fitted on the training rows only and can encode new rows of the same table later. An unusable table is
refused in one line that names the column and, if there is one, the row. Target columns of text, or with at most 20
different whole numbers, make a classification; others a regression.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hydra_tune.core.errors import SpecError, nearest, quoted
from hydra_tune.search_spaces.dataset import Data, labelled, measured, regression_fields, split, spread

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("csv", "parquet")
FEWEST_ROWS = 10
MOST_CATEGORIES = 100
MOST_NUMBERED_CLASSES = 20
MOSTLY_NUMBERS = 0.5
"""A text column with at least this share of numbers is treated as numbers with junk among them."""

TableTask = Literal["classification", "regression"]


@dataclass(frozen=True)
class Numbers:
    """A column of numbers; missing values become the mean."""

    name: str
    mean: float
    scale: float

    def encode(self, column: pd.Series[Any]) -> np.ndarray:
        values = (floats(column) - self.mean) / self.scale
        return np.nan_to_num(values, nan=0.0)[:, None]


@dataclass(frozen=True)
class Categories:
    """A column of categories, one-hot; missing and unknown values become all zeros."""

    name: str
    values: tuple[str, ...]

    def encode(self, column: pd.Series[Any]) -> np.ndarray:
        texts = column.astype(str).to_numpy()
        return np.stack([texts == value for value in self.values], axis=1).astype(float)


@dataclass(frozen=True)
class Encoding:
    """Encoding of a table's columns as the inputs of a model."""

    columns: tuple[Numbers | Categories, ...]
    target: str

    @classmethod
    def fit(cls, frame: pd.DataFrame, target: str, train: np.ndarray, where: str) -> Encoding:
        """Fit an encoding column by column on the rows `train`; `where` names the table in messages."""
        names = [name for name in frame.columns if name != target]
        return cls(tuple(_fit_column(frame[name], name, train, where) for name in names), target)

    def inputs(self, frame: pd.DataFrame) -> np.ndarray:
        """Return the rows of a table as numbers."""
        return np.concatenate([column.encode(frame[column.name]) for column in self.columns], axis=1)


def load_table(path: Path, file_format: str, target: str | None = None, task: TableTask | None = None) -> Data:
    """Load a table as data. The default `target` is the last column."""
    frame = read_frame(path, file_format)
    where = str(path)
    if len(frame) < FEWEST_ROWS:
        raise SpecError(f"{where} has {len(frame) or 'no'} rows", f"give at least {FEWEST_ROWS}")
    target = frame.columns[-1] if target is None else target
    if target not in frame.columns:
        raise SpecError(f"{where} has no column {quoted(target)}", nearest(str(target), frame.columns))
    if len(frame.columns) < 2:
        raise SpecError(f"{where} has no column besides the target {target!r}", "add columns to predict from")
    missing = frame[target].isna()
    if missing.any():
        raise SpecError(f"column {target!r} of {where} has no value in {_row(missing)}", "fill or remove such rows")
    task = _task(frame[target], task)
    return _classes(frame, target, where) if task == "classification" else _numbers(frame, target, where)


def read_frame(path: Path, file_format: str, **csv_options: Any) -> pd.DataFrame:
    """Read the table in a file, with column names as text; `csv_options` are those of pandas."""
    try:
        import pandas as pd
    except ImportError:
        raise SpecError("tables need the package pandas", "pip install pandas pyarrow") from None
    try:
        frame = pd.read_csv(path, **csv_options) if file_format == "csv" else pd.read_parquet(path)
    except FileNotFoundError:
        raise SpecError(f"there is no file {quoted(str(path))}", "give an existing path") from None
    except pd.errors.EmptyDataError:
        raise SpecError(f"{path} is empty", "give a header line and rows") from None
    except ImportError:
        raise SpecError("Parquet files need the package pyarrow", "pip install pyarrow") from None
    except (OSError, ValueError) as error:  # ParserError, UnicodeDecodeError and ArrowInvalid are ValueErrors
        reason = str(error).strip().splitlines()[0]
        raise SpecError(f"{path} cannot be read as {file_format}: {reason}", "check the file") from None
    return frame.rename(columns=str)


def _task(column: pd.Series[Any], stated: TableTask | None) -> TableTask:
    if stated is not None:
        if stated not in ("classification", "regression"):
            raise SpecError(f"a table cannot have the task {quoted(stated)}", "give classification or regression")
        return stated
    if not is_numeric(column) or str(column.dtype).startswith("bool"):
        return "classification"
    whole = bool((column == column.round()).all())
    return "classification" if whole and column.nunique() <= MOST_NUMBERED_CLASSES else "regression"


def _classes(frame: pd.DataFrame, target: str, where: str) -> Data:
    values, codes = np.unique(frame[target].to_numpy(), return_inverse=True)
    if len(values) < 2:
        raise SpecError(f"column {target!r} of {where} has one value only, {quoted(values[0])}", "nothing to predict")
    if len(values) > len(frame) / 2:
        raise SpecError(
            f"column {target!r} of {where} has {len(values)} classes in {len(frame)} rows",
            "name another target, or clean the column where it should hold numbers",
        )
    train, valid = split(len(frame), codes)
    encoding = Encoding.fit(frame, target, train, where)
    inputs = encoding.inputs(frame)
    return Data(
        name=where,
        task="classification",
        kind="features",
        train=labelled(inputs[train], codes[train]),
        valid=labelled(inputs[valid], codes[valid]),
        input_shape=inputs.shape[1:],
        outputs=len(values),
        labels=tuple(str(value) for value in values),
        encoding=encoding,
    )


def _numbers(frame: pd.DataFrame, target: str, where: str) -> Data:
    if not is_numeric(frame[target]):
        raise _junk(frame[target], target, where)
    values = floats(frame[target])
    _check_finite(values, target, where)
    train, valid = split(len(frame))
    encoding = Encoding.fit(frame, target, train, where)
    inputs = encoding.inputs(frame)
    fields = regression_fields(values, train, valid)
    targets = (values - fields["target_mean"]) / fields["target_scale"]
    return Data(
        name=where,
        task="regression",
        kind="features",
        train=measured(inputs[train], targets[train]),
        valid=measured(inputs[valid], targets[valid]),
        input_shape=inputs.shape[1:],
        outputs=1,
        encoding=encoding,
        **fields,
    )


def _fit_column(column: pd.Series[Any], name: str, train: np.ndarray, where: str) -> Numbers | Categories:
    if column.isna().all():
        raise SpecError(f"column {name!r} of {where} is empty", "remove it")
    if is_numeric(column):
        values = floats(column)
        _check_finite(values[~np.isnan(values)], name, where)
        known = values[train][~np.isnan(values[train])]
        return Numbers(name, float(known.mean()), float(spread(known)[0])) if len(known) else Numbers(name, 0.0, 1.0)
    if _to_numbers(column).notna().mean() >= MOSTLY_NUMBERS:
        raise _junk(column, name, where)
    categories = sorted(str(value) for value in column.iloc[train].dropna().unique())
    if len(categories) > MOST_CATEGORIES:
        raise SpecError(
            f"column {name!r} of {where} holds text with {len(categories)} different values, such as "
            f"{quoted(categories[0])}",
            f"remove it, or group it into at most {MOST_CATEGORIES}",
        )
    return Categories(name, tuple(categories))


def is_numeric(column: pd.Series[Any]) -> bool:
    from pandas.api.types import is_numeric_dtype

    return bool(is_numeric_dtype(column.dtype))


def floats(column: pd.Series[Any]) -> np.ndarray:
    """Return a numeric column as floats, with NaN for missing values, also of pandas' nullable types."""
    return np.asarray(column.to_numpy(dtype=float, na_value=np.nan))


def _to_numbers(column: pd.Series[Any]) -> pd.Series[Any]:
    import pandas as pd

    return pd.to_numeric(column.astype(str), errors="coerce")


def _junk(column: pd.Series[Any], name: str, where: str) -> SpecError:
    """Return the error for a column that should hold numbers, with the first value that is not one."""
    junk = column.notna() & _to_numbers(column).isna()
    value = column[junk].iloc[0]
    return SpecError(
        f"column {name!r} of {where} has {int(junk.sum())} values that are not numbers, "
        f"such as {quoted(value)} in {_row(junk)}",
        "mend or empty such cells",
    )


def _check_finite(values: np.ndarray, name: str, where: str) -> None:
    if not np.isfinite(values).all():
        raise SpecError(f"column {name!r} of {where} has infinite values", "mend or empty such cells")


def _row(mask: pd.Series[Any]) -> str:
    return f"row {int(np.argmax(mask.to_numpy())) + 1}"
