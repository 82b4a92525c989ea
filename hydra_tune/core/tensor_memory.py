"""Counts the bytes of live tensors as they are created and freed.

Accelerators keep such a count themselves; CPUs do not. `TensorBytes` works on both, but costs a Python call per
operation: strategies use it for one pilot batch, since every batch of that shape takes the same memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def has_memory(tensor: torch.Tensor) -> bool:
    """True if a tensor has elements in a storage of its own kind: not a sparse one, nor one that torch.func wraps."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    wrapped: bool = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not wrapped


class TensorBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, `peak` is the most bytes that the given tensors and all new tensors took together."""

    def __init__(self, already_there: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._seen: set[int] = set()
        self.add(already_there)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that existed before the mode was activated."""
        for tensor in tensors:
            self._count(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given: set[int] | None = None
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                # A tensor that is changed in place or views an input is not new.
                given = _storages((args, kwargs)) if given is None else given
                if leaf.untyped_storage()._cdata not in given:
                    self._count(leaf)
        return out

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided:
            return  # sparse tensors have no storage of their own; their parts are counted when created
        # Count storages, not tensors: views share a storage, which lives as long as its last view.
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen:
            return
        size = storage.nbytes()
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


def _storages(tree: Any) -> set[int]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]
    return {tensor.untyped_storage()._cdata for tensor in tensors}
