"""The columns of a table and their kinds: numbers, categories, dates or text; constant columns are ignored.

A schema is decided once, on the fitted table; `encoder` learns from values later. Other tables are read by the schema:
a missing column is an error, an extra one a note.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from hydra_tune.core.errors import SpecError, quoted
from hydra_tune.search_spaces.tables import floats, is_numeric

if TYPE_CHECKING:
    import pandas as pd

ColumnKind: TypeAlias = Literal["number", "date", "category", "words", "characters"]

MOSTLY = 0.9
"""A text column with at least this share of numbers, or of dates, is a column of those with invalid cells."""
TEXT_WORDS = 4.0
"""Columns with more words per value than this on average are text, however few values they have."""
FEW_VALUES = 20
_DATE = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}|\d{1,2}[ -][A-Za-z]{3,9}[ -,]+\d{4}|[A-Za-z]{3,9} \d{1,2},? \d{4}")
DATE_PARTS = ("days", "year", "month", "weekday", "hour")


@dataclass(frozen=True)
class Column:
    """One column to predict from."""

    name: str
    kind: ColumnKind
    gaps: bool = False
    """True if cells were empty in the fitted table; emptiness then becomes a number of its own."""

    @property
    def numbers(self) -> int:
        """Number of numbers it is encoded as."""
        return self.gaps + {"number": 1, "date": len(DATE_PARTS)}.get(self.kind, 0)


@dataclass(frozen=True)
class Schema:
    """The columns to predict from, in order."""

    columns: tuple[Column, ...]
    ignored: tuple[str, ...] = ()
    """Constant columns, which may be missing in other tables."""

    @classmethod
    def of(cls, frame: pd.DataFrame, where: str) -> tuple[Schema, list[str]]:
        """Return the schema of a frame without its target, and notes on ignored columns."""
        columns, notes, useless = [], [], []
        for name in frame.columns:
            values = frame[name]
            if values.nunique(dropna=False) < 2 or values.isna().all():
                useless.append(str(name))
                continue
            kind, junk = kind_of(values)
            if junk:
                notes.append(f"column {str(name)!r}: {junk} cells count as empty, as they hold no {kind}")
            columns.append(Column(str(name), kind, gaps=bool(values.isna().any()) or junk > 0))
        if useless:
            notes.append(f"of no use, as they never change: {', '.join(map(repr, useless[:5]))}{_more(useless)}")
        if not columns:
            raise SpecError(f"{where} has no column that changes besides the target", "add columns to predict from")
        return cls(tuple(columns), tuple(useless)), notes

    def check(self, names: Iterable[str], where: str, target: str) -> list[str]:
        """Raise SpecError if a table lacks a column; return the columns that the schema does not know."""
        present = set(names)
        lacking = [column.name for column in self.columns if column.name not in present]
        if lacking:
            raise SpecError(
                f"{where} lacks the column {quoted(lacking[0])}{_more(lacking, shown=1)}",
                "give every column that the model was fitted on; cells may be empty",
            )
        return sorted(present - {column.name for column in self.columns} - {*self.ignored, target})

    def of_kind(self, *kinds: ColumnKind) -> list[Column]:
        return [column for column in self.columns if column.kind in kinds]

    def numbers(self, frame: pd.DataFrame) -> np.ndarray:
        """Return all numbers of the rows, column by column, NaN for empty cells."""
        parts: list[np.ndarray] = []
        for column in self.columns:
            made: list[np.ndarray] = []
            if column.kind == "number":
                made.append(numbers_in(frame[column.name]))
            elif column.kind == "date":
                made.extend(date_parts(frame[column.name]))
            if column.gaps:
                empty = np.isnan(made[0]) if made else frame[column.name].isna().to_numpy()
                made.append(empty.astype(float))
            parts += made
        return np.stack(parts, axis=1) if parts else np.zeros((len(frame), 0))

    def as_json(self) -> dict[str, Any]:
        return {"columns": [asdict(column) for column in self.columns], "ignored": list(self.ignored)}

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Schema:
        return cls(tuple(Column(**column) for column in plain["columns"]), tuple(plain["ignored"]))


def kind_of(values: pd.Series[Any]) -> tuple[ColumnKind, int]:
    """Return the kind of a column, and the number of its cells that hold something else."""
    from pandas.api.types import is_datetime64_any_dtype, is_timedelta64_dtype

    if is_datetime64_any_dtype(values.dtype):
        return "date", 0
    if is_numeric(values) or is_timedelta64_dtype(values.dtype):
        return "number", 0
    known = values.dropna()
    texts = known.astype(str)
    junk = int(np.isnan(numbers_in(texts)).sum())
    if junk <= (1 - MOSTLY) * len(texts):
        return "number", junk
    if _looks_dated(texts):
        junk = int(np.isnan(date_parts(texts)[0]).sum())
        if junk <= (1 - MOSTLY) * len(texts):
            return "date", junk
    return _text_or_category(texts), 0


def numbers_in(values: pd.Series[Any]) -> np.ndarray:
    """Return a column as floats, NaN for anything but finite numbers."""
    import pandas as pd
    from pandas.api.types import is_timedelta64_dtype

    if is_timedelta64_dtype(values.dtype):
        return np.asarray(values.dt.total_seconds().to_numpy(dtype=float))
    numbers = floats(values if is_numeric(values) else pd.to_numeric(values.astype("object"), errors="coerce"))
    return np.where(np.isfinite(numbers), numbers, np.nan)


def date_parts(values: pd.Series[Any]) -> list[np.ndarray]:
    """Return days since 1970, and year, month, weekday and hour."""
    import pandas as pd
    from pandas.api.types import is_datetime64_any_dtype

    if not is_datetime64_any_dtype(values.dtype):
        values = pd.to_datetime(values, errors="coerce", utc=True, format="mixed")
    elif values.dt.tz is not None:
        values = values.dt.tz_convert("UTC")
    when = values.dt.tz_localize(None) if values.dt.tz is not None else values
    days = (when - pd.Timestamp(0)) / pd.Timedelta(days=1)
    parts = (days, when.dt.year, when.dt.month, when.dt.day_of_week, when.dt.hour)
    return [np.asarray(part.to_numpy(dtype=float, na_value=np.nan)) for part in parts]


def _looks_dated(texts: pd.Series[Any]) -> bool:
    """True if the first values have digits and separators like dates; parsing a whole column of text is slow."""
    few = texts.iloc[: 2 * FEW_VALUES]
    return sum(bool(_DATE.search(text)) for text in few) >= MOSTLY * len(few)


def _text_or_category(texts: pd.Series[Any]) -> ColumnKind:
    words = float(texts.str.split().str.len().mean())
    different = int(texts.nunique())
    mostly_new = different > FEW_VALUES and different > len(texts) / 2
    if (words > TEXT_WORDS and different > 2) or (mostly_new and words >= 2):
        return "words"
    return "characters" if mostly_new else "category"


def _more(names: list[str], shown: int = 5) -> str:
    return f" and {len(names) - shown} more" if len(names) > shown else ""
