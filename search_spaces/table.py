"""Model view of a table: layout of a row's numbers, categories and words, and scaling of targets.

Every row is encoded once for each fold, from the data of the other folds; inputs have the shape (folds, width), a row
is

    numbers, scaled | the same numbers, by quantiles | category codes | word codes of each text, padded with 0

A target has the columns (value, value on a log scale, fold, judged). In training a row trains the models of all folds
but its own; in judging only the model of its own fold answers. A row with fold -1 belongs to none and trains all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

MISSING, UNSEEN = 0, 1
"""First two codes of every category column; the learned categories follow."""

VALUE, LOG_VALUE, FOLD, JUDGED = range(4)
"""Columns of a target."""

NOBODYS = -1


@dataclass(frozen=True, kw_only=True)
class TableLayout:
    """Meaning of the numbers in one row of a table."""

    numbers: int
    categories: tuple[int, ...] = ()
    """Number of codes of each category column."""
    texts: tuple[tuple[int, int], ...] = ()
    """For each text column: the size of its vocabulary and the number of words in a row."""
    folds: int = 1
    rows: int = 0
    """Rows in the whole table, on which training parameters depend."""
    image: tuple[int, int, int] | None = None
    """Channels, height and width if the numbers are the pixels of an image."""

    @property
    def width(self) -> int:
        return int(self.codes().stop) + sum(length for _, length in self.texts)

    @property
    def tokens(self) -> int:
        """Number of columns to attend to."""
        return self.numbers + len(self.categories) + len(self.texts)

    def scaled(self, quantiles: bool) -> slice:
        """Return the slice of the scaled numbers; an image has its pixels only once."""
        return slice(self.numbers, 2 * self.numbers) if quantiles and self.image is None else slice(0, self.numbers)

    def codes(self) -> slice:
        """Return the slice of the category codes."""
        start = self.numbers if self.image is not None else 2 * self.numbers
        return slice(start, start + len(self.categories))

    def words(self) -> list[slice]:
        """Return the slice of each text column's word codes."""
        start = self.codes().stop
        slices = []
        for _, length in self.texts:
            slices.append(slice(start, start + length))
            start += length
        return slices

    def as_json(self) -> dict[str, Any]:
        return {
            "numbers": self.numbers, "categories": list(self.categories), "texts": [list(t) for t in self.texts],
            "folds": self.folds, "rows": self.rows, "image": None if self.image is None else list(self.image),
        }  # fmt: skip

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> TableLayout:
        channels, height, width = plain["image"] or (0, 0, 0)
        return cls(
            numbers=plain["numbers"],
            categories=tuple(plain["categories"]),
            texts=tuple((words, length) for words, length in plain["texts"]),
            folds=plain["folds"],
            rows=plain["rows"],
            image=(channels, height, width) if channels else None,
        )


@dataclass(frozen=True, kw_only=True)
class TargetScale:
    """Scales of the numbers to predict: in the user's units, and in training.

    `mean` and `scale` keep the stored values near one; `centres` and `spreads` are those of each fold's own training
    rows. With `unit`, a log scale is possible too: log(1 + value / unit), only for targets that are never negative.
    """

    mean: float = 0.0
    scale: float = 1.0
    unit: float | None = None
    centres: tuple[float, ...] = (0.0,)
    spreads: tuple[float, ...] = (1.0,)
    log_centres: tuple[float, ...] = (0.0,)
    log_spreads: tuple[float, ...] = (1.0,)

    def towards_model(self, targets: torch.Tensor, log: bool) -> torch.Tensor:
        """Return the scaled target for each fold's model: (rows, folds)."""
        centres, spreads = self._own(targets, log)
        return (targets[:, LOG_VALUE if log else VALUE, None] - centres) / spreads

    def towards_user(self, answers: torch.Tensor, log: bool) -> torch.Tensor:
        """Return the answers of the folds' models, (rows, folds, ...), in the user's units."""
        centres, spreads = self._own(answers, log)
        shape = (-1, *[1] * (answers.dim() - 2))
        values = answers * spreads.reshape(shape) + centres.reshape(shape)
        if not log:
            return values * self.scale + self.mean
        # A model that is far off must not overflow: no learned value is beyond e^30 units.
        return torch.expm1(values.clamp(max=30.0)) * (self.unit or 1.0)

    def _own(self, like: torch.Tensor, log: bool) -> tuple[torch.Tensor, torch.Tensor]:
        centres, spreads = (self.log_centres, self.log_spreads) if log else (self.centres, self.spreads)
        return like.new_tensor(centres), like.new_tensor(spreads)
