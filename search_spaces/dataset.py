"""A data set as families see it: its task, the shape of its inputs, and its training and validation parts.

Also the two steps that every source of data shares: the fixed, stratified split, and standardising with the statistics
of the training part alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np
import torch
from torch.utils.data import TensorDataset

from hydra_tune.core.errors import SpecError, quoted
from hydra_tune.search_spaces.table import TableLayout, TargetScale

Task: TypeAlias = Literal["classification", "regression", "language"]
Kind: TypeAlias = Literal["features", "sequence", "image", "tokens", "table"]

TASKS: tuple[Task, ...] = ("classification", "regression", "language")
KINDS: Mapping[Kind, int] = {"features": 1, "sequence": 2, "image": 3, "tokens": 1, "table": 2}
"""Kind of one input → number of dimensions: (n,), (steps, n), (channels, height, width), (steps,), (folds, n)."""

VALID_FRACTION = 0.2
SPLIT_SEED = 0
"""Fixed, not the study's seed: trials of different studies are compared on the same rows."""


@dataclass(frozen=True, kw_only=True)
class Data:
    """A data set, ready to train on.

    `outputs` is the number of classes, of target values, or of symbols in the vocabulary. Targets of a
    regression have the shape (outputs,) and may be standardised: `target_scale` is what one unit of them is
    in the user's units. `target_variance`, that of the validation targets, makes r² an average over batches.
    """

    name: str
    task: Task
    kind: Kind
    train: Any
    valid: Any
    input_shape: tuple[int, ...]
    outputs: int
    labels: tuple[str, ...] = ()
    target_mean: float = 0.0
    target_scale: float = 1.0
    target_variance: float = 1.0
    encoding: Any = field(default=None, repr=False)
    """Encoding of a table's columns as numbers (`tables.Encoding`); None for other sources."""
    layout: TableLayout | None = field(default=None, repr=False)
    """Meaning of the numbers in a row of kind "table"; None for other kinds."""
    target_scales: TargetScale | None = field(default=None, repr=False)
    """Scales of a table's target for the models of its folds; None for other sources."""

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise SpecError(f"data {self.name!r} has the task {quoted(self.task)}", f"known: {', '.join(TASKS)}")
        if KINDS.get(self.kind) != len(self.input_shape):
            raise SpecError(
                f"data {self.name!r} has inputs of kind {quoted(self.kind)} and shape {self.input_shape}",
                "known: features (n,), sequence (steps, n), image (channels, height, width), tokens (steps,), "
                "table (folds, n)",
            )
        for part in ("train", "valid"):
            if not len(getattr(self, part)):
                raise SpecError(f"the {part} part of data {self.name!r} has no rows", "give at least one")


def split(rows: int, classes: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return row numbers of the training and validation parts: shuffled, and stratified by class.

    A class with a single row is in the training part.
    """
    rng = np.random.default_rng(SPLIT_SEED)
    groups = [np.arange(rows)] if classes is None else [np.flatnonzero(classes == c) for c in np.unique(classes)]
    train, valid = [], []
    for group in groups:
        shuffled = rng.permutation(group)
        held_out = 0 if len(group) == 1 else max(1, round(VALID_FRACTION * len(group)))
        valid.append(shuffled[:held_out])
        train.append(shuffled[held_out:])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(valid))


def spread(values: np.ndarray) -> np.ndarray:
    """Return the standard deviation over rows, with 1 for constant columns to avoid division by zero."""
    deviation = np.atleast_1d(values.std(axis=0))
    return np.where(deviation > 1e-12, deviation, 1.0)


def labelled(inputs: np.ndarray, classes: np.ndarray) -> TensorDataset:
    """Return a dataset of inputs with class numbers."""
    return TensorDataset(torch.as_tensor(inputs, dtype=torch.float32), torch.as_tensor(classes, dtype=torch.long))


def measured(inputs: np.ndarray, targets: np.ndarray) -> TensorDataset:
    """Return a dataset of inputs with one column of numbers to predict."""
    column = torch.as_tensor(targets, dtype=torch.float32).reshape(-1, 1)
    return TensorDataset(torch.as_tensor(inputs, dtype=torch.float32), column)


class RegressionFields(TypedDict):
    """The fields of a regression `Data` that describe its targets."""

    target_mean: float
    target_scale: float
    target_variance: float


def regression_fields(targets: np.ndarray, train: np.ndarray, valid: np.ndarray) -> RegressionFields:
    """Return the target fields of a regression `Data`, from the targets in the user's units."""
    scale = float(spread(targets[train])[0])
    variance = float(np.var(targets[valid] / scale))
    return {
        "target_mean": float(targets[train].mean()),
        "target_scale": scale,
        "target_variance": variance if variance > 0 else 1.0,
    }
