"""Encodes the cells of a table as the numbers of a row (`search_spaces/table.py`), learned from some of its rows.

Numbers are scaled in two ways, robustly and by quantiles, and models choose; empty ones become the median. Categories
get codes; rare and unseen ones share one. Texts get the codes of their words, or of groups of three characters. An
encoder is saved as JSON for names and safetensors for numbers.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hydra_tune.automl.schema import Column, Schema
from hydra_tune.search_spaces.table import MISSING, UNSEEN, TableLayout

if TYPE_CHECKING:
    import pandas as pd

QUANTILES = 201
STRAIGHT = 3.0
FURTHEST = 3.1
"""Position on the normal scale of values beyond all learned ones."""
MOST_CATEGORIES = 1000
RARE = 2
"""Categories seen less often than this are encoded as unseen, in a column with many categories."""
FEW_CATEGORIES = 20
MOST_WORDS = 5000
COMMON = 0.8
"""Words in a larger share of the rows are ignored."""
LONGEST_TEXT = 64


@dataclass(frozen=True)
class Numbers:
    """Statistics of all number columns."""

    fills: np.ndarray
    centres: np.ndarray
    spreads: np.ndarray
    quantiles: np.ndarray
    """Shape (columns, QUANTILES)."""

    @classmethod
    def learn(cls, values: np.ndarray) -> Numbers:
        columns = values.shape[1]
        fills, quantiles = np.zeros(columns), np.zeros((columns, QUANTILES))
        for i in range(columns):
            known = values[~np.isnan(values[:, i]), i]
            if len(known):
                quantiles[i] = np.quantile(known, np.linspace(0, 1, QUANTILES))
                fills[i] = np.median(known)
        low, high = quantiles[:, QUANTILES // 4], quantiles[:, -(QUANTILES // 4) - 1]
        whole = quantiles[:, -1] - quantiles[:, 0]
        # The quartiles are equal if most rows have one value.
        spreads = np.where(high > low, (high - low) / 1.35, np.where(whole > 0, whole / 2, 1.0))
        return cls(fills, fills.copy(), spreads, quantiles)

    def encode(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the values robustly scaled and softly clipped, and mapped to a normal distribution by quantiles."""
        filled = np.where(np.isnan(values), self.fills, values)
        scaled = (filled - self.centres) / self.spreads
        # Linear where most values are, so that a linear model stays linear; logarithmic for outliers.
        beyond = np.maximum(np.abs(scaled) - STRAIGHT, 0.0)
        return np.clip(scaled, -STRAIGHT, STRAIGHT) + np.sign(scaled) * np.log1p(beyond), self._normal(filled)

    def _normal(self, filled: np.ndarray) -> np.ndarray:
        from scipy.special import ndtri

        shares = np.linspace(0, 1, QUANTILES)
        made = np.empty_like(filled)
        for i, own in enumerate(self.quantiles):
            # From both sides: a value that fills several quantiles gets their middle.
            up = np.interp(filled[:, i], own, shares)
            down = 1 - np.interp(-filled[:, i], -own[::-1], shares)
            made[:, i] = (up + down) / 2
        edge = 1e-3
        return np.asarray(np.clip(ndtri(np.clip(made, edge, 1 - edge)), -FURTHEST, FURTHEST))


@dataclass(frozen=True)
class Encoder:
    """The encoding learned from some rows of a table."""

    schema: Schema
    numbers: Numbers
    categories: tuple[dict[str, int], ...]
    """For each category column, the code of each category."""
    words: tuple[dict[str, int], ...]
    """For each text column, the code of each word."""
    lengths: tuple[int, ...]
    """For each text column, the number of words read per row."""

    @classmethod
    def learn(cls, schema: Schema, frame: pd.DataFrame) -> Encoder:
        """Learn the encoding from the rows of a frame."""
        texts = [
            [pieces(text, column) for text in _texts(frame, column)] for column in schema.of_kind("words", "characters")
        ]
        return cls(
            schema,
            Numbers.learn(schema.numbers(frame)),
            tuple(_learn_categories(_texts(frame, column)) for column in schema.of_kind("category")),
            tuple(_learn_words(rows) for rows in texts),
            tuple(min(LONGEST_TEXT, max([1, *map(len, rows)])) for rows in texts),
        )

    def encode(self, frame: pd.DataFrame, layout: TableLayout) -> np.ndarray:
        """Encode the rows of a frame as numbers, shape (rows, layout.width)."""
        parts = list(self.numbers.encode(self.schema.numbers(frame)))
        for column, codes in zip(self.schema.of_kind("category"), self.categories, strict=True):
            parts.append(np.array([[_code(text, codes)] for text in _texts(frame, column)], dtype=float))
        texts = zip(self.schema.of_kind("words", "characters"), self.words, layout.texts, strict=True)
        for column, codes, (_, length) in texts:
            rows = np.zeros((len(frame), length))
            for i, text in enumerate(_texts(frame, column)):
                known = [codes[piece] for piece in pieces(text, column) if piece in codes][:length]
                rows[i, : len(known)] = known
            parts.append(rows)
        return np.concatenate(parts, axis=1).astype(np.float32)

    def names(self) -> dict[str, Any]:
        """Return the learned names, for JSON."""
        return {"categories": list(self.categories), "words": list(self.words), "lengths": list(self.lengths)}

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the learned numbers."""
        return {name: getattr(self.numbers, name) for name in ("fills", "centres", "spreads", "quantiles")}

    @classmethod
    def restore(cls, schema: Schema, names: dict[str, Any], arrays: dict[str, np.ndarray]) -> Encoder:
        return cls(
            schema, Numbers(**arrays), tuple(names["categories"]), tuple(names["words"]), tuple(names["lengths"])
        )


def layout_for(encoders: list[Encoder], rows: int) -> TableLayout:
    """Return one layout for the encoders of all folds: each column as wide as the widest encoder needs."""
    first = encoders[0]
    return TableLayout(
        numbers=len(first.numbers.fills),
        categories=tuple(max(len(e.categories[i]) for e in encoders) + 2 for i in range(len(first.categories))),
        texts=tuple(
            (max(len(e.words[i]) for e in encoders), max(e.lengths[i] for e in encoders))
            for i in range(len(first.words))
        ),
        folds=len(encoders),
        rows=rows,
    )


def origins(schema: Schema, layout: TableLayout) -> dict[str, list[int]]:
    """Return the positions in an encoded row that come from each column of the table."""
    places: dict[str, list[int]] = {column.name: [] for column in schema.columns}
    numbered = [column.name for column in schema.columns for _ in range(column.numbers)]
    for i, name in enumerate(numbered):
        places[name] += [i, layout.numbers + i]
    for i, column in enumerate(schema.of_kind("category")):
        places[column.name].append(layout.codes().start + i)
    for column, where in zip(schema.of_kind("words", "characters"), layout.words(), strict=True):
        places[column.name] += range(where.start, where.stop)
    return places


def pieces(text: str | None, column: Column) -> list[str]:
    """Return the words of a text, or its groups of three characters with start and end marked."""
    if text is None:
        return []
    if column.kind == "words":
        return re.findall(r"\w+", text.lower())
    marked = f"^{text.lower()}$"
    return [marked[i : i + 3] for i in range(max(1, len(marked) - 2))]


def _texts(frame: pd.DataFrame, column: Column) -> list[str | None]:
    values = frame[column.name]
    return [None if gap else str(value) for value, gap in zip(values.tolist(), values.isna().tolist(), strict=True)]


def _code(text: str | None, codes: dict[str, int]) -> int:
    return MISSING if text is None else codes.get(text, UNSEEN)


def _learn_categories(texts: list[str | None]) -> dict[str, int]:
    counts = Counter(text for text in texts if text is not None)
    least = RARE if len(counts) > FEW_CATEGORIES else 1
    kept = [text for text, count in counts.most_common(MOST_CATEGORIES) if count >= least]
    return {text: code for code, text in enumerate(sorted(kept), start=2)}


def _learn_words(rows: list[list[str]]) -> dict[str, int]:
    counts = Counter(piece for row in rows for piece in set(row))
    least = RARE if len(rows) > FEW_CATEGORIES else 1
    useful = Counter({piece: count for piece, count in counts.items() if least <= count <= COMMON * len(rows)})
    return {piece: code for code, (piece, _) in enumerate(sorted(useful.most_common(MOST_WORDS)), start=1)}
