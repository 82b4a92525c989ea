"""The kit of a pipelined trial: made by the builder, and loaded by every device that trains a part of the trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from hydra_tune.engine.worker import WorkerContext
from hydra_tune.graph.program import Program
from hydra_tune.spill.layout import Layout
from hydra_tune.strategies.pipeline.parameters import Dense, Parameters
from hydra_tune.strategies.pipeline.stages import Stage
from hydra_tune.strategies.shard.optimizers import OptimizerParts
from hydra_tune.strategies.shard.plan import Bundle
from hydra_tune.training.prepared import HasPrepared
from hydra_tune.training.sent import Shapes, packed_for_workers, unpacked_in_worker


@dataclass(frozen=True)
class Held:
    """The spill blocks that transport one device's state."""

    bundles: tuple[Bundle, ...]
    buffers: Mapping[str, Layout]


@dataclass(frozen=True)
class PipelineKit(HasPrepared):
    """The data that every worker of a pipelined trial loads: candidate with an empty model, datasets, stages."""

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


def packed_kit(context: WorkerContext, kit: PipelineKit, initial: str, shapes: Shapes) -> bytes:
    """Pack a kit for any worker of this run; `shapes` are those of the model before it was emptied."""
    rest = {field.name: getattr(kit, field.name) for field in fields(kit) if field.name != "prepared"}
    return packed_for_workers(context, kit.prepared, initial, shapes, rest)


def unpacked_kit(context: WorkerContext, data: bytes) -> PipelineKit:
    """Unpack a kit in a worker that trains a part of the trial."""
    prepared, rest = unpacked_in_worker(context, data)
    return PipelineKit(prepared, **rest)
