"""Activations that a forward leaves for its backward, as blocks: they stay on the device while there is room.

Autograd asks where to put each tensor that it saves, and asks for it again in the backward. Here a tensor becomes a
block of the device's memory, which may be spilled like any other and is read again when it is wanted; parameters are
only referred to, by their place in a block. A block is discarded when autograd has dropped all handles to it.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hydra_tune.core.errors import CandidateError
from hydra_tune.core.tensor_memory import has_memory
from hydra_tune.spill.device_memory import DeviceMemory
from hydra_tune.spill.store import SpillFiles
from hydra_tune.strategies.shard.values import as_bytes


@dataclass(frozen=True)
class Window:
    """A tensor's place in a block."""

    key: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def place(self) -> tuple[str, int]:
        """Key of the block, and the byte at which the tensor begins in it."""
        return self.key, self.offset * self.dtype.itemsize


class Handle:
    """Autograd's reference to a saved tensor; when it is deleted, the tensor is not needed any more."""

    __slots__ = ("_ended", "conj", "neg", "shard", "window")

    def __init__(self, window: Window, shard: int, tensor: torch.Tensor, ended: deque[Window]) -> None:
        self.window = window
        self.shard = shard
        self.conj, self.neg = tensor.is_conj(), tensor.is_neg()
        self._ended = ended

    def is_of(self, ended: deque[Window]) -> bool:
        """True if the handle belongs to the batch whose ended handles are collected in `ended`."""
        return self._ended is ended

    def __del__(self) -> None:
        # Python may call this at any moment, with locks held: what follows from it is done later.
        if hasattr(self, "_ended"):  # one that was never finished, as in a traced copy, has nothing to say
            self._ended.append(self.window)


class SavedTensors:
    """Tensors that the forward of one batch saves for its backward."""

    def __init__(self, memory: DeviceMemory, files: SpillFiles) -> None:
        self._memory = memory
        self._files = files
        self._made: Counter[int] = Counter()
        """Number of blocks that each shard has made; names repeat in each batch, so that their files are used again."""
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], str]] = {}
        """Keys of storages that are blocks, by address, with a weak reference to tell an ended storage from a new
        one."""
        self._handles: Counter[str] = Counter()
        self._places: Counter[tuple[str, int]] = Counter()
        self._ended: deque[Window] = deque()
        self.of_shard: dict[int, dict[str, None]] = {}
        """Keys of the activations' blocks that are still needed, by the shard that saved them."""
        self._shard_of: dict[str, int] = {}
        self._address_of: dict[str, int] = {}
        self._buffers: dict[int, torch.UntypedStorage] = {}
        """Storages of the model's buffers, by address."""

    def leave_alone(self, buffers: Iterable[torch.Tensor]) -> None:
        """Do not save what lies in the model's buffers: they are on the device all the time."""
        storages = [buffer.untyped_storage() for buffer in buffers if has_memory(buffer)]
        self._buffers = {storage._cdata: storage for storage in storages}

    def refer_to(self, key: str, block: torch.Tensor) -> None:
        """Refer to tensors in this block from now on, instead of saving them."""
        storage = block.untyped_storage()
        self._known[storage._cdata] = (weakref.ref(storage), key)

    def pack(self, tensor: torch.Tensor, shard: int, due: float) -> object:
        """Make the tensor a block, or find the block that it lies in."""
        if not has_memory(tensor) or tensor.device != self._memory.device:
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata in self._buffers:
            return tensor.detach()
        known = self._known.get(storage._cdata)
        if known is None or known[0]() is not storage:
            key = f"a/{shard}/{self._made[shard]}"
            self._made[shard] += 1
            self._memory.adopt(self._files, key, as_bytes(tensor), due)
            known = self._known[storage._cdata] = (weakref.ref(storage), key)
            self.of_shard.setdefault(shard, {})[key] = None
            self._shard_of[key], self._address_of[key] = shard, storage._cdata
        offset = int(tensor.storage_offset())
        window = Window(known[1], tensor.dtype, offset, tuple(tensor.shape), tensor.stride())
        self._handles[window.key] += 1
        self._places[window.place] += 1
        return Handle(window, shard, tensor, self._ended)

    def check(self, handle: Handle) -> None:
        """Raise CandidateError for a handle of an earlier batch: its blocks are gone."""
        if not handle.is_of(self._ended):
            raise CandidateError(
                "the backward goes through the graph of an earlier batch", "detach what is kept, or use strategy whole"
            )

    def sweep(self) -> list[str]:
        """Return the keys of the blocks that autograd has released since the last call."""
        done = []
        while self._ended:
            window = self._ended.popleft()
            self._handles[window.key] -= 1
            self._places[window.place] -= 1
            if not self._handles[window.key]:
                del self._handles[window.key]
                if window.key.startswith("a/"):
                    self._forget(window.key)
                    done.append(window.key)
        return done

    def _forget(self, key: str) -> None:
        del self.of_shard[self._shard_of.pop(key)][key]
        address = self._address_of.pop(key)
        if address in self._known and self._known[address][1] == key:
            del self._known[address]  # the storage may be saved again

    def keys(self) -> list[str]:
        """Return the keys of the activations' blocks that are still needed."""
        return list(self._shard_of)

    def wants(self, key: str, start: int, stop: int) -> bool:
        """True if autograd still refers to what lies in these bytes of a block."""
        return any(
            count > 0 and start <= place < stop for (block, place), count in self._places.items() if block == key
        )

    def clear(self) -> list[str]:
        """Forget the batch; return the keys of the blocks that are left."""
        left = [key for keys in self.of_shard.values() for key in keys]
        self._known.clear()
        self._handles.clear()
        self._places.clear()
        self._ended = deque()  # handles that somebody still holds are of the past
        self.of_shard.clear()
        self._shard_of.clear()
        self._address_of.clear()
        self._made.clear()
        return left
