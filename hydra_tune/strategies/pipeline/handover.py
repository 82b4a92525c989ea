"""Passing tensors from one worker to another, through files on shared memory that both keep mapped.

The sender copies a tensor into its place and the receiver reads it there, so passing costs one copy. A place belongs to
one value of one micro-batch; the next batch reuses it once all devices are done with this one. Only the places travel
through the coordinator, never the contents.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from hydra_tune.engine.sealed import Sealed
from hydra_tune.spill.places import NO_ROOM, SpillFull
from hydra_tune.strategies.shard.values import compact, strided


@dataclass(frozen=True)
class BufferSlice:
    """The file, dtype and shape of a passed tensor."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    grad: bool
    """True if a gradient must come back."""

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


class Handover:
    """One worker's end of the passing, for one trial."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self.directory = directory
        self.device = device
        self._mapped: dict[str, torch.Tensor] = {}

    def send(self, name: str, tree: Any) -> Sealed:
        """Copy the tensors of a value to shared files; return the same tree with places instead of tensors."""
        leaves, spec = tree_flatten(tree)
        return Sealed.of(tree_unflatten([self._put(f"{name}-{i}", leaf) for i, leaf in enumerate(leaves)], spec))

    def receive(self, sent: Sealed) -> Any:
        """Return a value another worker sent; on a CPU its tensors share the sender's memory: do not modify."""
        return tree_map(lambda leaf: self._get(leaf) if isinstance(leaf, BufferSlice) else leaf, sent.open())

    def _put(self, name: str, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensor = compact(leaf.detach())
        place = BufferSlice(
            str(self.directory / name), tensor.dtype, tuple(tensor.shape), tensor.stride(), leaf.requires_grad
        )
        if place.bytes:
            self._at(place, make=True).copy_(tensor)
        return place

    def _get(self, place: BufferSlice) -> torch.Tensor:
        if not place.bytes:
            return torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device=self.device)
        return self._at(place, make=False).to(self.device).requires_grad_(place.grad)

    def _at(self, place: BufferSlice, *, make: bool) -> torch.Tensor:
        block = self._mapped.get(place.path)
        if block is None or block.numel() < place.bytes:
            if make:
                self._grow(place)
            with _disable_current_modes():  # host memory: not counted as the device's
                block = torch.from_file(place.path, shared=True, size=place.bytes, dtype=torch.uint8)
            self._mapped[place.path] = block
        return strided(block, place.dtype, 0, place.shape, place.stride)

    def _grow(self, place: BufferSlice) -> None:
        # The directory exists only while the trial does, so a late send leaves no file behind.
        descriptor = os.open(place.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, place.bytes)  # fail now rather than with a bus error later
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise SpillFull(place.bytes, [Path(place.path)]) from error
        finally:
            os.close(descriptor)
