"""Values of one batch that pass between shards: each a tree of tensors and plain numbers, kept as blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hydra_tune.spill.device_memory import DeviceMemory
from hydra_tune.spill.store import SpillFiles


@dataclass(frozen=True)
class Piece:
    """A tensor of a value, and its place in a block."""

    name: str
    """Name made of the value's number and the tensor's position in it."""
    key: str
    """Key of its block: one of its own, or one that autograd saved with the same contents."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    grad: bool
    """True if a gradient flows back through it."""

    @property
    def gradient(self) -> str:
        """Key of the block with its gradient."""
        return f"d/{self.name}"

    def view(self, block: torch.Tensor) -> torch.Tensor:
        return strided(block, self.dtype, 0, self.shape, self.stride)


@dataclass(frozen=True)
class Value:
    """Structure of a value: its tree, and for each leaf a piece or the plain object itself."""

    tree: TreeSpec
    leaves: tuple[Any, ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Piece))


class Values:
    """The values of the batch in hand."""

    def __init__(self, memory: DeviceMemory, files: SpillFiles) -> None:
        self._memory = memory
        self._files = files
        self._values: dict[int, Value] = {}

    def put(self, value: int, tree: Any, due: float, saved: Callable[[torch.Tensor], str | None] | None = None) -> None:
        """Keep a value until it is dropped; `saved` returns the key of a tensor's block if autograd has saved it."""
        leaves, spec = tree_flatten(tree)
        kept: list[Any] = []
        for i, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                kept.append(leaf)
                continue
            tensor = compact(leaf.detach())
            name = f"{value}/{i}"
            key = saved(tensor) if saved is not None else None
            if key is None:
                key = f"x/{name}"
                self._memory.adopt(self._files, key, as_bytes(tensor), due)
            kept.append(Piece(name, key, tensor.dtype, tuple(tensor.shape), tensor.stride(), leaf.requires_grad))
        self._values[value] = Value(spec, tuple(kept))

    def __getitem__(self, value: int) -> Value:
        return self._values[value]

    def tree(self, value: int, tensors: dict[str, torch.Tensor]) -> Any:
        """Return the value's tree, from its tensors by name."""
        known = self._values[value]
        return tree_unflatten(
            [tensors[leaf.name] if isinstance(leaf, Piece) else leaf for leaf in known.leaves], known.tree
        )

    def drop(self, value: int) -> None:
        """Discard a value and its blocks: nothing needs it any longer."""
        for piece in self._values.pop(value).pieces:
            if piece.key.startswith("x/"):
                self._memory.discard(self._files, piece.key)

    def drop_all(self) -> None:
        for value in list(self._values):
            self.drop(value)


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if it fills its storage, else a copy that does."""
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    if whole and tensor.storage_offset() == 0 and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.contiguous().clone() if tensor.is_contiguous() else tensor.resolve_conj().resolve_neg().contiguous()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor that fills its storage, sharing them."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def strided(
    block: torch.Tensor, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """Return a tensor in a block of bytes; it is not a view to autograd, so it may be changed in place."""
    return torch.empty(0, dtype=dtype, device=block.device).set_(block.untyped_storage(), offset, shape, stride)
