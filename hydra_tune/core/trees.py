"""Batches as trees of tensors: call a model on a batch, move a batch to a device, slice its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """Return the model's outputs: a tuple or list is passed as positional arguments, a dict as keywords."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def move(batch: Any, device: torch.device) -> Any:
    """Return the batch with the same structure and every tensor on `device`."""
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
    """Return rows `start` to `stop` of a batch's inputs or targets; leaves without `rows` rows stay whole."""
    if (start, stop) == (0, rows):
        return tree

    def some(leaf: Any) -> Any:
        return leaf[start:stop] if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == rows else leaf

    return tree_map(some, tree)
