"""Finds which of a model's own tensors operations use, wherever user code took them from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hydra_tune.core.tensor_memory import TensorBytes


class OwnTensors:
    """The model's own tensors, by address; several may lie in one storage."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._places: dict[int, list[tuple[int, int, str]]] = {}
        for name, tensor in named:
            if tensor.layout is torch.strided and tensor.numel():
                self._places.setdefault(tensor.untyped_storage()._cdata, []).append((*_extent(tensor), name))
        self.storages = set(self._places)

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if a tensor lies in a storage of one of the model's own tensors."""
        return tensor.untyped_storage()._cdata in self._places

    def names(self, tensor: torch.Tensor) -> list[str]:
        """Return the names of the model's tensors whose memory this one shares."""
        places = self._places.get(tensor.untyped_storage()._cdata)
        if places is None:
            return []
        if len(places) == 1:
            return [places[0][2]]
        start, stop = _extent(tensor)
        return [name for first, last, name in places if first < stop and start < last]


class UseCounter(TensorBytes):  # type: ignore[no-untyped-call]
    """Counts the bytes of live tensors without the model's own, and reports each use of one of the model's own."""

    def __init__(
        self, own: OwnTensors, there: Iterable[torch.Tensor], on_use: Callable[[str, bool], None],
        on_count: Callable[[int], None],
    ) -> None:  # fmt: skip
        """Set the callbacks: `on_use` gets a tensor's name and True if it is written to, `on_count` the live bytes."""
        super().__init__()
        self._own, self._on_use, self._on_count = own, on_use, on_count
        self._seen |= own.storages
        self.add(there)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
                for name in self._own.names(leaf):
                    self._on_use(name, func._schema.is_mutable and _changes(func, args, leaf))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _count(self, tensor: torch.Tensor) -> None:
        super()._count(tensor)
        self._on_count(self.live)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the offsets of a tensor's first byte in its storage and of the first byte after it."""
    start = int(tensor.storage_offset())
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * tensor.element_size(), (start + steps + 1) * tensor.element_size()


def _changes(func: Any, args: Sequence[Any], tensor: torch.Tensor) -> bool:
    """True if this operation writes to this argument."""
    arguments = enumerate(func._schema.arguments)
    written = [index for index, each in arguments if each.alias_info and each.alias_info.is_write]
    return any(index < len(args) and args[index] is tensor for index in written)
