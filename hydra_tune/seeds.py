"""Seeds and random state: what makes a trial depend on nothing but its parameters and its seed."""

from __future__ import annotations

import hashlib
import random
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


def new_study_seed() -> int:
    """A seed for a study whose user gave none; it is recorded, so that the study can be repeated."""
    return secrets.randbelow(2**31)


def trial_seed(study_seed: int, number: int) -> int:
    """The seed of trial `number`: well mixed, so that neighbouring trials and studies share no streams."""
    digest = hashlib.blake2b(f"{study_seed}/{number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest) >> 1


def seed_everything(seed: int) -> None:
    """Seed torch, and with it numpy and `random`, which user code may draw from."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@dataclass(frozen=True)
class RandomState:
    """A point in the random streams of this process, to come back to.

    Trials take turns in one worker, and evaluation must not move the training stream: both save and restore it.
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
        # A copy: torch reads a state that is part of a larger storage from that storage's beginning.
        torch.set_rng_state(self.torch_state.clone())
        np.random.set_state(self.numpy_state)
        random.setstate(self.python_state)
        if self.device_state is not None and device is not None:
            torch.get_device_module(device).set_rng_state(self.device_state, device)

    def same_as(self, other: RandomState) -> bool:
        """Whether nothing was drawn from one to the other."""
        ours, theirs = self.numpy_state["state"], other.numpy_state["state"]
        return (
            torch.equal(self.torch_state, other.torch_state)
            and self.python_state == other.python_state
            and ours["pos"] == theirs["pos"]
            and np.array_equal(ours["key"], theirs["key"])
        )

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return dict(vars(self))

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> RandomState:
        return cls(**state)
