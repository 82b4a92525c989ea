"""Plain data of a pipelined trial: its layout, and the messages between devices, relayed by the coordinator.

The coordinator relays values and random states sealed: the tensors are in files on shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hydra_tune.engine.sealed import Sealed
from hydra_tune.strategies.pipeline.stages import Stage

PLACERS = ("best", "m-topo", "m-etf", "m-sct", "fused", "balanced")
"""`fused` takes the best of the three after a local search, with layers placed together with their only users: large
stages that pass few bytes."""
Random = Sealed | int | None
"""Random state at the start of a forward: a sealed state, a seed, or None if no random numbers are drawn."""
Sent = dict[int, Sealed]
"""Sealed values by number, with places instead of tensors; for gradients, a list with one per tensor."""


@dataclass(frozen=True)
class PipelineRequest:
    """The user's options for a pipeline, and the memory of the devices in bytes."""

    microbatches: int | None
    placer: str
    order: str
    capacity: tuple[int, ...]
    trials: int
    """Number of trials on the devices at the same time."""
    on_cores: bool = True
    """True if the devices are cores of this machine, which slow each other down."""


@dataclass(frozen=True)
class Staged:
    """A laid-out trial: the files its devices load, and its position in training."""

    kit: str
    directory: str
    places: tuple[str, ...]
    name: str
    inputs: tuple[str, ...]
    """Arguments of the model that come from a batch: the first values."""
    stages: tuple[Stage, ...]
    placer: str
    predicted_seconds: float
    microbatches: int
    draws: bool
    judged_at_random: bool
    """True if evaluation draws random numbers too: its batches then run one by one, as in a plain loop."""
    data: tuple[int, int, int]
    valid_rows: tuple[int, ...]
    position: dict[str, Any]
    history: list[dict[str, float]]
    clip_grad_norm: float | None
    accumulate: int
    notes: tuple[str, ...]
    warning: str
    between_steps: bool
    """True if training can pause only between steps, because accumulated gradients cannot be stored."""


@dataclass(frozen=True)
class Fetched:
    """A batch's micro-batches, as far as other devices need them, and the random state after the batch."""

    sent: list[Sent]
    random: Random


@dataclass
class Forwarded:
    """The result of a stage's forward: values, or gradients from the stage with the loss."""

    sent: Sent
    random: Random = None
    loss: float = 0.0


@dataclass(frozen=True)
class Evaluated:
    """The result of a stage's forward in evaluation: values, or metrics from the stage with the loss."""

    sent: Sent
    random: Random
    metrics: dict[str, float]
