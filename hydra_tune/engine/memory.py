"""Counting the bytes of live tensors, as they are made and freed.

Accelerators keep such a count themselves; CPUs do not. `TensorBytes` counts on either, at the price of a Python call
for each operation: strategies use it for one pilot batch, as every batch of that shape takes the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, `peak` is the most bytes that the given tensors and all new ones took together."""

    def __init__(self, already_there: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._seen: set[int] = set()
        self.add(already_there)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were there before."""
        for tensor in tensors:
            self._count(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given: set[int] | None = None
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                # What an operation changes in place, or is given and views, is not new.
                given = _storages((args, kwargs)) if given is None else given
                if leaf.untyped_storage()._cdata not in given:
                    self._count(leaf)
        return out

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided:
            return  # sparse tensors have no storage of their own; their parts are counted as they are made
        # Storages are counted, not tensors: views share one, and it lives as long as its last view.
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
