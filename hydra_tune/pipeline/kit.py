"""What travels between the builder, the coordinator and the devices of a pipelined trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hydra_tune.candidate import Candidate, Dataset
from hydra_tune.graph.program import Program
from hydra_tune.pipeline.parameters import Dense, Parameters
from hydra_tune.pipeline.stages import Stage
from hydra_tune.shards.layout import Layout
from hydra_tune.shards.optimizers import OptimizerParts
from hydra_tune.shards.plan import Bundle


@dataclass(frozen=True)
class Held:
    """The blocks in which a device's state travels."""

    bundles: tuple[Bundle, ...]
    buffers: Mapping[str, Layout]


@dataclass(frozen=True)
class PipelineKit:
    """What every worker of a pipelined trial gets: the candidate with an empty model, its data and its stages."""

    candidate: Candidate
    train: Dataset
    valid: Dataset | None
    seed: int
    program: Program
    stages: tuple[Stage, ...]
    held: tuple[Held, ...]
    """For each device."""
    parts: OptimizerParts
    draws: bool
    data: tuple[int, int, int]
    capacity: tuple[int, ...]
    """What each device has for this trial."""
    parameters: type[Parameters] = Dense
    """How a device has its parameters."""


Random = dict[str, Any] | int | None
"""Where in the random streams a forward starts: a state, a seed, or wherever, as it draws nothing."""
Sent = dict[int, Any]
"""Values by number, with places instead of tensors; for gradients, a list with one for each tensor of the value."""


@dataclass(frozen=True)
class Fetched:
    """A batch's micro-batches, as far as other devices need them, and where the random streams stand after it."""

    sent: list[Sent]
    random: Random


@dataclass
class Forwarded:
    """What a stage's forward hands on: values, or at the loss, gradients."""

    sent: Sent
    random: Random = None
    loss: float = 0.0


@dataclass(frozen=True)
class Judged:
    """What a stage's forward in evaluation hands on: values, or at the loss, the metrics of the batch."""

    sent: Sent
    random: Random
    metrics: dict[str, float]
