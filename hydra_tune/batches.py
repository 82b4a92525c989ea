"""Which rows make which batch, and how they are fetched: the same for every strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import TensorDataset, default_collate

from hydra_tune.candidate import Candidate, Dataset
from hydra_tune.errors import CandidateError, quoted


def epoch_order(rows: int, seed: int, epoch: int) -> torch.Tensor:
    """The order of the training rows in `epoch`: a permutation that depends on the trial's seed and the epoch only."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(epoch_seed(seed, epoch)))


def epoch_seed(seed: int, epoch: int) -> int:
    """What the order of an epoch is drawn from."""
    return (seed * 1_000_003 + epoch) % 2**63


class Batches:
    """The batches of one dataset, by position, so that training can stop and go on anywhere in an epoch.

    Data may bring a kind of batches of its own, such as a DataLoader's; whoever says `Batches(...)` gets those.
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
        """How many rows batch `position` has: its weight in a mean."""
        return min(self.size, self.rows - position * self.size)

    def fetch(self, epoch: int, position: int) -> tuple[Any, Any]:
        """Batch `position` of `epoch` as (inputs, targets)."""
        rows = self._rows(epoch)[position * self.size : (position + 1) * self.size]
        return fetch_rows(self.data, rows, self.collate)

    def _rows(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            epoch = 0
        if self._order is None or self._order[0] != epoch:
            order = epoch_order(self.rows, self.seed, epoch) if self.shuffle else torch.arange(self.rows)
            self._order = (epoch, order)
        return self._order[1]


def fetch_rows(data: Dataset, rows: torch.Tensor, collate: Callable[[list[Any]], Any] | None) -> tuple[Any, Any]:
    """The named rows as one batch; a TensorDataset is indexed at once, which is far quicker than row by row."""
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


def call_model(model: nn.Module, inputs: Any) -> Any:
    """The model's outputs: a tuple or list as positional arguments, a dict as keywords, else one argument."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def move(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on `device`, its structure kept."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: move(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value, device) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(move(value, device) for value in batch)
    return batch


def some_rows(tree: Any, rows: int, start: int, stop: int) -> Any:
    """The rows from `start` to `stop` of a batch's inputs or targets, where they are made of rows."""
    if (start, stop) == (0, rows):
        return tree

    def some(leaf: Any) -> Any:
        return leaf[start:stop] if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == rows else leaf

    return tree_map(some, tree)
