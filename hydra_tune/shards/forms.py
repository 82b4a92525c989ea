"""How the state of a trial that lies in blocks is written for others: as a checkpoint, and as a model's weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


class Form:
    """As it is: blocks of whole parameters have what a plain `Training` has."""

    between_steps = False
    """Whether it has no place for gradients that wait for a step: then training pauses between steps only."""

    def checkpoint(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state that a checkpoint gets, of what `put_together` gives."""
        return state

    def weights(self, kept: Tensors | None, present: Callable[[], Tensors]) -> Tensors:
        """Every parameter and buffer to be saved: those of the epoch to keep, where one was kept."""
        return present() if kept is None else kept
