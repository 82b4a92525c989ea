"""Tensors as bytes of a block, and bytes of a block as tensors."""

from __future__ import annotations

import torch


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
