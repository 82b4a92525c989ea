"""Assigns rows to batches and fetches them, in the same way for every strategy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import TensorDataset, default_collate

from hydra_tune.core.errors import CandidateError, quoted
from hydra_tune.training.candidate import Candidate, Dataset


def epoch_order(rows: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the order of the training rows in `epoch`, a permutation by the trial's seed and the epoch only."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(epoch_seed(seed, epoch)))


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of an epoch's row order."""
    return (seed * 1_000_003 + epoch) % 2**63


class Batches:
    """The batches of one dataset, by position, so that training can stop and resume anywhere in an epoch.

    Data may bring its own kind of batches, such as a DataLoader's; `Batches(...)` then returns that kind.
    """

    def __new__(cls, _candidate: Candidate, data: Dataset, **_options: Any) -> Batches:
        kind = getattr(data, "batches", None)
        return super().__new__(kind if isinstance(kind, type) and issubclass(kind, Batches) else cls)

    def __init__(self, candidate: Candidate, data: Dataset, *, training: bool, seed: int = 0) -> None:
        self.data = data
        self.rows = len(data)
        self.size = candidate.batch_size
        self.seed = seed
        self.shuffle = training and candidate.shuffle
        self.collate = candidate.collate
        whole = self.rows // self.size if training and candidate.drop_last else math.ceil(self.rows / self.size)
        self.count = whole
        self._order: tuple[int, torch.Tensor] | None = None

    def __len__(self) -> int:
        return self.count

    def rows_at(self, position: int) -> int:
        """Return the number of rows in batch `position`, its weight in a mean."""
        return min(self.size, self.rows - position * self.size)

    def fetch(self, epoch: int, position: int) -> tuple[Any, Any]:
        """Return batch `position` of `epoch` as (inputs, targets)."""
        return fetch_rows(self.data, self.rows_of(epoch, position), self.collate)

    def rows_of(self, epoch: int, position: int) -> torch.Tensor:
        """Return the rows of batch `position` of `epoch`."""
        return self._rows(epoch)[position * self.size : (position + 1) * self.size]

    def _rows(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            epoch = 0
        if self._order is None or self._order[0] != epoch:
            order = epoch_order(self.rows, self.seed, epoch) if self.shuffle else torch.arange(self.rows)
            self._order = (epoch, order)
        return self._order[1]


def fetch_rows(data: Dataset, rows: torch.Tensor, collate: Callable[[list[Any]], Any] | None) -> tuple[Any, Any]:
    """Return the given rows as one batch; a TensorDataset is indexed at once, far faster than row by row."""
    if collate is None and type(data) is TensorDataset:
        batch = data[rows]
    else:
        indices = rows.tolist()
        many = getattr(data, "__getitems__", None)
        samples = many(indices) if callable(many) else [data[i] for i in indices]
        batch = (collate or default_collate)(samples)
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise CandidateError(
            f"a batch of the dataset is {quoted(batch)}",
            "a dataset gives (inputs, targets); put several inputs into a tuple or dict",
        )
    return batch[0], batch[1]
