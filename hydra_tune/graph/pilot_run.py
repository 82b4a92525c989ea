"""Measurements of one pilot run by node, and the copies of what autograd saves in it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import _disable_current_modes


@dataclass
class ModuleCall:
    """Measurements of one node in one run."""

    name: str
    parameters: dict[str, None] = field(default_factory=dict)
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    step_seconds: float = 0.0
    saved: int = 0
    """Bytes of the tensors that autograd saved first in this node."""
    forward_peak: int = 0
    """Most bytes alive at once, batch included, without the bytes that this node itself had saved by then."""
    unsaved: int = 0
    """Most bytes alive at once, batch included, without the bytes that any node had saved by then."""
    forward_live: int = 0
    """Most bytes alive at once in the forward, batch and saved tensors included, as far as user code holds them."""
    backward_held: int = 0
    """Most bytes alive at once in the backward, with the saved tensors that it has asked for and not yet released."""
    backward_peak: int = 0
    """Most bytes alive at once in the backward and its optimizer steps, without saved tensors."""
    stepless_peak: int = 0
    """Most bytes alive at once in the backward without its optimizer steps and without saved tensors."""


@dataclass
class PilotRun:
    spans: list[ModuleCall]
    changes_buffers: bool = False
    draws: bool = False


@dataclass(frozen=True)
class SavedTensor:
    """A copy of a tensor that autograd saved, and the index of the node that saved it."""

    span: int
    tensor: torch.Tensor


class SavedCopies:
    """Copies of the tensors that autograd saves in one run.

    Autograd has the copy, so that the tensor itself lives only as long as something else refers to it, as it does where
    saved tensors are spilled.
    """

    def __init__(self) -> None:
        self.at = 0
        """Index of the present node."""
        self.live = 0
        """Bytes of saved tensors to which something besides autograd refers too."""
        self.live_here = 0
        """Bytes of those tensors that the present node saved."""
        self.held = 0
        """Bytes of the copies that the backward has asked for and not yet released."""
        self._copies: dict[int, tuple[weakref.ref[torch.UntypedStorage], weakref.ref[torch.UntypedStorage]]] = {}
        """Storages that autograd saved, and those of their copies, by the address of the former."""
        self._held: set[int] = set()
        """Addresses of the copies that are held."""

    def save(self, tensor: torch.Tensor, span: int) -> tuple[SavedTensor, int]:
        """Return a tensor of a copy, and the bytes that were copied: none if its storage has been saved before."""
        size = 0
        with _disable_current_modes():
            storage = tensor.untyped_storage()
            known = self._copies.get(storage._cdata)
            copy = known[1]() if known is not None and known[0]() is storage else None
            if copy is None:
                size = storage.nbytes()
                copy = torch.empty(0, dtype=torch.uint8).set_(storage).clone().untyped_storage()
                self._copies[storage._cdata] = (weakref.ref(storage), weakref.ref(copy))
                self.live += size
                self.live_here += size
                weakref.finalize(storage, self._freed, span, size)
            kept = torch.empty(0, dtype=tensor.dtype).set_(
                copy, tensor.storage_offset(), tensor.size(), tensor.stride()
            )
        return SavedTensor(span, kept), size

    def _freed(self, span: int, size: int) -> None:
        """Stop counting a saved tensor: nothing but autograd refers to it any longer."""
        self.live -= size
        if span == self.at:
            self.live_here -= size

    def hold(self, saved: SavedTensor) -> None:
        """Count a copy that the backward has asked for, until autograd releases it."""
        copy = saved.tensor.untyped_storage()
        if copy._cdata not in self._held:
            self._held.add(copy._cdata)
            self.held += copy.nbytes()
            weakref.finalize(copy, self._released, copy._cdata, copy.nbytes())

    def _released(self, address: int, size: int) -> None:
        self._held.discard(address)
        self.held -= size
