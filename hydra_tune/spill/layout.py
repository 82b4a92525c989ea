"""Layout of tensors in a block: names, shapes and offsets, so that a block moves as one and is used as many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hydra_tune.core.alignment import aligned


@dataclass(frozen=True)
class Field:
    """One tensor in a block."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Layout:
    """The tensors of a block."""

    fields: tuple[Field, ...]
    size: int

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]]) -> Layout:
        """Lay the tensors out one after another, each aligned."""
        fields: list[Field] = []
        end = 0
        for name, dtype, shape in tensors:
            size = dtype.itemsize * torch.Size(shape).numel()
            fields.append(Field(name, dtype, tuple(shape), end, size))
            end += aligned(size)
        return cls(tuple(fields), end)

    def views(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors in a block of bytes, sharing its memory."""
        storage, start, device = block.untyped_storage(), int(block.storage_offset()), block.device
        return {
            field.name: torch.empty(0, dtype=field.dtype, device=device).set_(
                storage, (start + field.offset) // field.dtype.itemsize, torch.Size(field.shape)
            )  # type: ignore[call-overload]
            for field in self.fields
        }

    def fill(self, block: torch.Tensor, tensors: Mapping[str, Any]) -> None:
        """Copy tensors of these names into the block; missing ones become zero."""
        block.zero_()
        for name, view in self.views(block).items():
            if tensors.get(name) is not None:
                view.copy_(tensors[name])
