"""Saves and restores the random generators of this process, so that trials that take turns do not share them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class RandomState:
    """A snapshot of this process's random generators.

    Trials take turns in one worker, and evaluation must not advance the training generator: both save and restore it.
    """

    torch_state: torch.Tensor
    numpy_state: dict[str, Any]
    python_state: tuple[Any, ...]
    device_state: torch.Tensor | None = None

    @classmethod
    def capture(cls, device: torch.device | None = None) -> RandomState:
        on_device = None
        if device is not None and device.type != "cpu":
            on_device = torch.get_device_module(device).get_rng_state(device)
        return cls(torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate(), on_device)

    def restore(self, device: torch.device | None = None) -> None:
        # A copy: torch reads a state that is a slice of a larger storage from the start of that storage.
        torch.set_rng_state(self.torch_state.clone())
        np.random.set_state(self.numpy_state)
        random.setstate(self.python_state)
        if device is None or device.type == "cpu":
            return
        module = torch.get_device_module(device)
        if self.device_state is not None:
            module.set_rng_state(self.device_state, device)
            return
        # Captured where there is no such device. A plain loop's torch.manual_seed would have seeded it too.
        module.manual_seed(torch.initial_seed())

    def same_outside_torch(self, other: RandomState) -> bool:
        """True if nothing was drawn from Python's or NumPy's generators between the two snapshots."""
        ours, theirs = self.numpy_state["state"], other.numpy_state["state"]
        return (
            self.python_state == other.python_state
            and bool(ours["pos"] == theirs["pos"])
            and bool(np.array_equal(ours["key"], theirs["key"]))
        )

    def same_as(self, other: RandomState) -> bool:
        """True if no random number was drawn between the two snapshots."""
        return torch.equal(self.torch_state, other.torch_state) and self.same_outside_torch(other)

    def state(self) -> dict[str, Any]:
        """Return the fields as a dict for a checkpoint."""
        return dict(vars(self))

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> RandomState:
        return cls(**state)
