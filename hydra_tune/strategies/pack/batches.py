"""The batches of a pack: each member's own rows in its own order, stacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import TensorDataset

from hydra_tune.strategies.pack.refusal import CannotPack
from hydra_tune.training.batches import Batches


def is_plain(batches: Batches) -> bool:
    """True if no code of the user makes these batches, so that none can draw random numbers."""
    return type(batches) is Batches and type(batches.data) is TensorDataset and batches.collate is None


def share_data(members: Sequence[Batches]) -> bool:
    """True if all batches are of the same tensors."""
    first = members[0]
    if not all(is_plain(each) and len(each.data.tensors) == 2 for each in members):
        return False
    return all(
        mine.data_ptr() == theirs.data_ptr() and mine.shape == theirs.shape and mine.stride() == theirs.stride()
        for each in members[1:]
        for mine, theirs in zip(first.data.tensors, each.data.tensors, strict=True)
    )


def stacked_rows(members: Sequence[Batches], epochs: Sequence[int], position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of all members whose data are the same tensors, by one selection of rows."""
    rows = torch.stack([each.rows_of(epoch, position) for each, epoch in zip(members, epochs, strict=True)])
    inputs, targets = members[0].data.tensors
    flat = rows.reshape(-1)
    return inputs.index_select(0, flat).unflatten(0, rows.shape), targets.index_select(0, flat).unflatten(0, rows.shape)


def stacked(trees: Sequence[Any]) -> Any:
    """Return trees of equal structure as one, each tensor with a row for each member."""
    if not trees:
        return None
    leaves, specs = zip(*(tree_flatten(tree) for tree in trees), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise CannotPack("batches of its data differ in structure from trial to trial")
    return tree_unflatten([_stacked(each) for each in zip(*leaves, strict=True)], specs[0])


def _stacked(leaves: Sequence[Any]) -> torch.Tensor:
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise CannotPack("batches of its data hold more than tensors")
    if len({(leaf.shape, leaf.dtype) for leaf in leaves}) > 1:
        raise CannotPack("batches of its data differ in shape from trial to trial")
    return torch.stack(list(leaves))
