"""One block of bytes on a device: its content, its state, and whether it can be taken off the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hydra_tune.core.devices import format_bytes
from hydra_tune.engine.unit import TrialEnded
from hydra_tune.spill.store import SpillFiles


class OutOfDeviceMemory(TrialEnded):
    """A step needs more memory than the device's budget."""

    status = "OUT_OF_MEMORY"

    def __init__(self, needed: int, budget: int) -> None:
        super().__init__(f"a step needs {format_bytes(needed)} of a device budget of {format_bytes(budget)}")


@dataclass
class Block:
    """A block on the device, or being read or written."""

    files: SpillFiles
    key: str
    size: int
    due: float
    version: int = 0
    content: torch.Tensor | None = None
    """None until the block has been read."""
    buffer: torch.Tensor | None = None
    """Buffer that holds the content, if it is to be reused."""
    changed: bool = False
    pins: int = 0
    moving: bool = False
    """True while a thread reads or writes the block."""

    @property
    def referred_to(self) -> bool:
        """True if a tensor outside of this block shares its memory, so that giving the block up would free nothing."""
        memory = self.content if self.buffer is None else self.buffer
        if memory is None or not self.size:
            return False
        own = 1 if self.buffer is None or self.content is None else 2
        return tensors_on(memory) > own

    @property
    def is_idle(self) -> bool:
        """True if no step uses the block, and no thread moves it."""
        return self.pins == 0 and not self.moving

    @property
    def can_go(self) -> bool:
        """True if the block can be taken off the device now."""
        return self.is_idle and not self.referred_to


def tensors_on(memory: torch.Tensor) -> int:
    """The number of tensors that share this one's storage, itself included."""
    # The count includes the Python object through which the storage is asked.
    uses: int = torch._C._storage_Use_Count(memory.untyped_storage()._cdata)
    return uses - 1
