"""Forms in which the state of a trial in blocks is written: as a checkpoint, and as a model's weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


class CheckpointForm:
    """The plain form: blocks of whole parameters, with the same contents as a plain `Training`."""

    between_steps = False
    """True if the form has no place for gradients that wait for a step; training then pauses between steps only."""

    def checkpoint(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a checkpoint's state, made from the state that `put_together` returns."""
        return state

    def weights(self, kept: Tensors | None, present: Callable[[], Tensors]) -> Tensors:
        """Return the parameters and buffers to save: those of the kept epoch if there is one, else the present ones."""
        return present() if kept is None else kept
