"""The small part of a trial's state: position, random streams, schedule, and optimizers' plain numbers.

It is committed with the trial's blocks as one JSON document, so that another process can continue the trial.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

from hydra_tune.core.state_tree import decode, encode
from hydra_tune.strategies.shard.optimizers import Options

_CPU = torch.device("cpu")


@dataclass
class Logbook:
    """A trial's position and small state as of a moment."""

    random: dict[str, Any]
    groups: list[Options]
    """Present options of each parameter group, such as the learning rate."""
    schedule: Any = None
    epoch: int = 0
    batch: int = 0
    steps: int = 0
    loss_sum: float = 0.0
    loss_rows: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    started: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Plain numbers in the optimizer state of each parameter that has made a step; its tensors are in blocks."""
    touched: set[str] = field(default_factory=set)
    """Parameters with a gradient that no step has used yet."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Results of modules' `get_extra_state`, by module."""
    attributes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Plain attributes of modules that training has changed, by module."""
    kept: bool = False
    """True if the weights of the best epoch so far are kept apart."""
    commits: int = 0

    def as_json(self) -> Any:
        """Return the logbook as plain data, with tensors as base64 text."""
        document, tensors = encode(vars(self))
        return {"document": document, "tensors": base64.b64encode(save(tensors)).decode()}

    @classmethod
    def from_json(cls, stored: Any) -> Logbook:
        return cls(**decode(stored["document"], load(base64.b64decode(stored["tensors"]))))


def plain_scalar(value: Any) -> Any:
    """Return an entry of a parameter's optimizer state as plain data; a one-number tensor keeps its dtype."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype).removeprefix("torch."), value.item(), value.device.type != "cpu")
    return value.item() if isinstance(value, np.generic) else value


def as_scalar(stored: Any, device: torch.device = _CPU) -> Any:
    """Return the entry that `plain_scalar` converted; a tensor is on `device` if its optimizer keeps it there."""
    if isinstance(stored, tuple) and len(stored) == 4 and stored[0] == "tensor":
        _, dtype, number, beside = stored
        return torch.tensor(number, dtype=getattr(torch, dtype), device=device if beside else _CPU)
    return stored
