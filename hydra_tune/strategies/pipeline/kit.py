"""The kit of a pipelined trial: made by the builder, and loaded by every device that trains a part of the trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hydra_tune.graph.program import Program
from hydra_tune.spill.layout import Layout
from hydra_tune.strategies.pipeline.parameters import Dense, Parameters
from hydra_tune.strategies.pipeline.stages import Stage
from hydra_tune.strategies.shard.optimizers import OptimizerParts
from hydra_tune.strategies.shard.plan import Bundle
from hydra_tune.training.candidate import Candidate, Dataset


@dataclass(frozen=True)
class Held:
    """The spill blocks that transport one device's state."""

    bundles: tuple[Bundle, ...]
    buffers: Mapping[str, Layout]


@dataclass(frozen=True)
class PipelineKit:
    """The data that every worker of a pipelined trial loads: candidate with an empty model, datasets, stages."""

    candidate: Candidate
    train: Dataset
    valid: Dataset | None
    seed: int
    program: Program
    stages: tuple[Stage, ...]
    held: tuple[Held, ...]
    """Blocks of each device."""
    parts: OptimizerParts
    draws: bool
    data: tuple[int, int, int]
    capacity: tuple[int, ...]
    """Bytes that each device has for this trial."""
    parameters: type[Parameters] = Dense
    """Class that stores a device's parameters."""
