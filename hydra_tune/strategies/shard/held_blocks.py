"""The blocks that one shard holds on the device during its part of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch

from hydra_tune.spill.block import OutOfDeviceMemory

if TYPE_CHECKING:
    from hydra_tune.strategies.shard.runner import ShardRunner


class HeldBlocks:
    """Blocks that one shard holds on the device during its part of a batch; all are released at its end."""

    def __init__(self, runner: ShardRunner, position: int) -> None:
        self._runner = runner
        self._memory, self._files = runner.memory, runner.files
        self.position = position
        self.held: dict[str, torch.Tensor] = {}
        self._changed: set[str] = set()

    def hold(self, key: str) -> torch.Tensor:
        """Return a block's content, on the device until the step ends."""
        if key not in self.held:
            size = 0 if (stored := self._files.find(key)) is None else stored.size
            self.held[key] = self._with_room(size, lambda: self._memory.acquire(self._files, key, due=0.0))
        return self.held[key]

    def make(self, key: str, size: int) -> torch.Tensor:
        """Make a new block of `size` bytes and return it."""
        self.held[key] = self._with_room(size, lambda: self._memory.new(self._files, key, size))
        self._changed.add(key)
        return self.held[key]

    def _with_room(self, size: int, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Do work that needs `size` bytes of device memory; if there are too few, release other blocks first."""
        for give_way in (partial(self._runner.reserve_less, size), self._runner.make_way):
            try:
                return work()
            except OutOfDeviceMemory:
                give_way()
        return work()

    def change(self, key: str) -> None:
        """Note that the step has changed this block."""
        self._changed.add(key)

    def drop(self, key: str) -> None:
        """Discard a block that is no longer needed."""
        if self.held.pop(key, None) is not None:
            self._memory.release(self._files, key, due=0.0)
        self._memory.discard(self._files, key)

    def release(self, keys: Iterable[str]) -> None:
        """Release blocks; they can be held again."""
        for key in keys:
            del self.held[key]
            version = self._runner.next_version() if key in self._changed else None
            self._changed.discard(key)
            self._memory.release(self._files, key, self._runner.due(key, self.position), changed_at=version)

    def end(self) -> None:
        self.release(list(self.held))
