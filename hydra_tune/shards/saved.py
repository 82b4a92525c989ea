"""Activations that a forward leaves for its backward, as blocks: they stay on the device while there is room.

Autograd asks where to put each tensor that it saves, and asks for it again in the backward. Here a tensor becomes a
block of the device's memory, which may be spilled like any other and is read again when it is wanted; parameters,
buffers and values that are blocks already are only referred to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hydra_tune.engine.device_memory import DeviceMemory
from hydra_tune.engine.spill import SpillFiles
from hydra_tune.shards.values import as_bytes, strided


@dataclass(frozen=True)
class Handle:
    """A saved tensor: a window into a block."""

    key: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def place(self) -> int:
        """Where it begins in its block, in bytes."""
        return self.offset * self.dtype.itemsize


class SavedTensors:
    """What the forward of one shard saves, for one batch."""

    def __init__(self, memory: DeviceMemory, files: SpillFiles, shard: int, due: float) -> None:
        self._memory = memory
        self._files = files
        self._shard = shard
        self._due = due
        self.keys: list[str] = []
        self.hold: Callable[[str], torch.Tensor] | None = None
        """In the backward: brings a block to the device and keeps it there until the step ends."""
        self._blocks: dict[int, tuple[torch.UntypedStorage, str]] = {}
        """While the forward runs: storages that are blocks. They are held, so that no address is used again."""
        self._wanted: Counter[tuple[str, int]] = Counter()
        """How often the backward will still ask for what lies in a block at an offset in bytes."""

    def refer_to(self, blocks: dict[str, torch.Tensor]) -> None:
        """Tensors in these blocks are referred to, not saved again."""
        for key, block in blocks.items():
            storage = block.untyped_storage()
            self._blocks[storage._cdata] = (storage, key)

    def key_of(self, tensor: torch.Tensor) -> str | None:
        """While the forward runs: the block that autograd saved with exactly this tensor's storage."""
        found = self._blocks.get(tensor.untyped_storage()._cdata)
        return found[1] if found is not None and found[1].startswith("a/") else None

    def forward_done(self) -> None:
        """Let go of the storages: from here on blocks alone decide what stays."""
        self._blocks.clear()

    def pack(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided or not tensor.numel() or tensor.device != self._memory.device:
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata not in self._blocks:
            key = f"a/{self._shard}/{len(self.keys)}"
            self._memory.adopt(self._files, key, as_bytes(tensor), self._due)
            self.keys.append(key)
            self._blocks[storage._cdata] = (storage, key)
        key = self._blocks[storage._cdata][1]
        handle = Handle(key, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
        self._wanted[key, handle.place] += 1
        return handle

    def unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, Handle):
            return saved  # type: ignore[no-any-return]
        assert self.hold is not None
        self._wanted[saved.key, saved.place] -= 1
        return strided(self.hold(saved.key), saved.dtype, saved.offset, saved.shape, saved.stride)

    def wants(self, key: str, start: int, stop: int) -> bool:
        """Whether the backward still needs what lies in these bytes of a block."""
        return any(
            count > 0 and start <= place < stop for (block, place), count in self._wanted.items() if block == key
        )

    def discard(self) -> None:
        """The backward is done."""
        for key in self.keys:
            self._memory.discard(self._files, key)
        self.keys.clear()


class Enter(torch.autograd.Function):
    """Where a value enters a shard: its gradient is put aside for the shard that made it.

    Not a leaf tensor: autograd would hold the value's memory until the backward. The value comes in a list, out of
    autograd's sight, so that the shard may change it in place.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: list[torch.Tensor], put_aside: Callable[..., None]) -> Any:
        ctx.put_aside = put_aside
        return value.pop()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.put_aside(grads[0])
        return None, None, None
