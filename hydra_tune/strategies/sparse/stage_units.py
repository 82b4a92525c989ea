"""Device units of a pruned trial in stages, in addition to those of `pipeline.units`."""

from __future__ import annotations

from hydra_tune.engine.worker import WorkerContext
from hydra_tune.strategies.pipeline.part import Part
from hydra_tune.strategies.sparse.stage_parameters import Compressed


def state_bytes(context: WorkerContext, attempt: str) -> int:
    """Return the bytes of all state on this device, counted from the storages."""
    part: Part = context.resident[attempt]
    parameters = part.share.parameters
    assert isinstance(parameters, Compressed)
    return parameters.weights.state_bytes()
