"""Collectives of a gang, on any kind of device.

The backend is the one that torch names for the device: NCCL for CUDA, whatever a third-party backend has registered
for its own, gloo for all others. Gloo knows host memory only (and CUDA's): other tensors go through it.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

GLOO = "gloo"
REACHED_BY_GLOO = ("cpu", "cuda")


class Pending(Protocol):
    """A collective that runs in the background."""

    def wait(self) -> object:
        """Wait until the tensor has its result."""


def group_backend(kind: str) -> str:
    """Return the torch.distributed backend for a kind of device."""
    named = dist.Backend.default_device_backend_map.get(kind, GLOO)
    return named if dist.is_backend_available(named) else GLOO


def all_reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """Replace a tensor by its sum, or by another reduction, over the gang."""
    begin_all_reduce(tensor, op).wait()


def begin_all_reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Pending:
    """Start to replace a tensor by its sum over the gang."""
    reached = _for_backend(tensor)
    work = dist.all_reduce(reached, op=op, async_op=True)
    assert work is not None
    return work if reached is tensor else _ThroughHost(work, reached, tensor)


def broadcast(tensor: torch.Tensor, source: int) -> None:
    """Replace a tensor by that of one member of the gang."""
    reached = _for_backend(tensor)
    dist.broadcast(reached, src=source)
    if reached is not tensor:
        tensor.copy_(reached)


def _for_backend(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if the gang's backend can reach it, else a copy in host memory."""
    if dist.get_backend() == GLOO and tensor.device.type not in REACHED_BY_GLOO:
        return tensor.cpu()
    return tensor


class _ThroughHost:
    """A collective on a copy in host memory."""

    def __init__(self, work: dist.Work, host: torch.Tensor, tensor: torch.Tensor) -> None:
        self._work = work
        self._host = host
        self._tensor = tensor

    def wait(self) -> None:
        self._work.wait()
        self._tensor.copy_(self._host)
