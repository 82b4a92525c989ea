"""The kit of a trial in shards: all that a worker needs to train it, but for the blocks.

A kit travels from the builder to devices, with a candidate whose model is empty.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from hydra_tune.engine.worker import WorkerContext
from hydra_tune.strategies.shard.first_batch import FirstBatch
from hydra_tune.strategies.shard.optimizers import OptimizerParts
from hydra_tune.strategies.shard.plan import Plan
from hydra_tune.strategies.shard.skeleton import empty_parameters
from hydra_tune.training.prepared import HasPrepared
from hydra_tune.training.sent import packed_for_workers, shapes_of_parameters, unpacked_in_worker


@dataclass(frozen=True)
class Kit(HasPrepared):
    """The candidate with an empty model, its data and its plan."""

    seed: int
    plan: Plan
    parts: OptimizerParts
    mixed: bool = False
    """True if operations compute in 16 bits where that does no harm."""
    between_steps: bool = False
    """True if training pauses between steps only, because waiting gradients have no place in a checkpoint."""
    first: FirstBatch | None = None
    """Loss and gradients of the first batch as the whole model gives them; None if it has not run it."""
    initial: str = ""
    """Fingerprint of the weights that the build made; empty if unknown."""


def packed_kit(context: WorkerContext, kit: Kit) -> bytes:
    """Pack a kit for any worker of this run."""
    rest = {field.name: getattr(kit, field.name) for field in fields(kit) if field.name != "prepared"}
    shapes = shapes_of_parameters(kit.candidate.model)
    return packed_for_workers(context, kit.prepared, kit.initial, shapes, rest)


def unpacked_kit(context: WorkerContext, data: bytes) -> Kit:
    """Unpack a kit in the worker that trains; its model is empty."""
    prepared, rest = unpacked_in_worker(context, data)
    empty_parameters(prepared.candidate.model)
    return Kit(prepared, **rest)
