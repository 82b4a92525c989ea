"""The small part of a trial's state: its position, random streams, schedule and what optimizers keep besides tensors.

Committed with the trial's blocks as one JSON document, so that another process can take the trial up.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

from hydra_tune.shards.optimizers import Options
from hydra_tune.state_tree import decode, encode

_CPU = torch.device("cpu")


@dataclass
class Logbook:
    """Where a trial stands."""

    random: dict[str, Any]
    groups: list[Options]
    """The options of each parameter group now."""
    schedule: Any = None
    epoch: int = 0
    batch: int = 0
    steps: int = 0
    loss_sum: float = 0.0
    loss_rows: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    started: dict[str, dict[str, Any]] = field(default_factory=dict)
    """For each parameter that has made a step, what its optimizer keeps besides tensors in blocks."""
    touched: set[str] = field(default_factory=set)
    """Parameters with a gradient that no step has used yet."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What modules keep besides tensors, as it was when the trial was cut."""
    kept: bool = False
    """Whether the weights of the best epoch so far are kept apart."""
    commits: int = 0

    def as_json(self) -> Any:
        """As plain data; tensors as text."""
        document, tensors = encode(vars(self))
        return {"document": document, "tensors": base64.b64encode(save(tensors)).decode()}

    @classmethod
    def from_json(cls, stored: Any) -> Logbook:
        return cls(**decode(stored["document"], load(base64.b64decode(stored["tensors"]))))


def plain_scalar(value: Any) -> Any:
    """What an optimizer keeps for a parameter, as plain data; a tensor of one number with its dtype."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype).removeprefix("torch."), value.item(), value.device.type != "cpu")
    return value.item() if isinstance(value, np.generic) else value


def as_scalar(stored: Any, device: torch.device = _CPU) -> Any:
    """What `plain_scalar` made plain, as the optimizer keeps it: some kinds keep it beside the parameter."""
    if isinstance(stored, tuple) and len(stored) == 4 and stored[0] == "tensor":
        _, dtype, number, beside = stored
        return torch.tensor(number, dtype=getattr(torch, dtype), device=device if beside else _CPU)
    return stored
