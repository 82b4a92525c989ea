"""The kit of a trial in shards: all that a worker needs to train it, but for the blocks.

A kit travels from the builder to devices. The candidate in it is pickled, with an empty model; where a pickled copy
would lack something (hooks of parameters) or cannot be made (parametrized modules), the worker builds it again.
"""

from __future__ import annotations

import logging
import pickle
from dataclasses import dataclass

import cloudpickle

from hydra_tune.core.errors import CandidateError
from hydra_tune.engine.transfer import unpack
from hydra_tune.engine.worker import WorkerContext
from hydra_tune.strategies.shard.first_batch import FirstBatch
from hydra_tune.strategies.shard.optimizers import OptimizerParts
from hydra_tune.strategies.shard.plan import Plan
from hydra_tune.strategies.shard.skeleton import empty_parameters
from hydra_tune.training.builds import build_again
from hydra_tune.training.candidate import Candidate, Dataset
from hydra_tune.training.prepared import Origin, Prepared, fingerprint, packed_candidate

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kit:
    """The candidate with an empty model, its data and its plan."""

    prepared: Prepared
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

    @property
    def candidate(self) -> Candidate:
        return self.prepared.candidate

    @property
    def train(self) -> Dataset:
        return self.prepared.train

    @property
    def valid(self) -> Dataset | None:
        return self.prepared.valid


@dataclass(frozen=True)
class _Packed:
    """A packed kit, with the candidate as a parcel or the build that makes it again."""

    parcel: bytes | None
    origin: Origin | None
    seed: int
    plan: Plan
    parts: OptimizerParts
    mixed: bool
    between_steps: bool
    first: FirstBatch | None
    initial: str


def packed_kit(context: WorkerContext, kit: Kit) -> bytes:
    """Pack a kit for any worker of this run."""
    prepared = kit.prepared
    try:
        parcel: bytes | None = packed_candidate(context, prepared)
    except CandidateError as error:
        if prepared.origin is None:
            raise
        logger.info("devices build the candidate again: %s", error)
        parcel = None
    found: bytes = cloudpickle.dumps(
        _Packed(
            parcel, prepared.origin, kit.seed, kit.plan, kit.parts, kit.mixed, kit.between_steps, kit.first, kit.initial
        )
    )
    return found


def unpacked_kit(context: WorkerContext, data: bytes) -> Kit:
    """Unpack a kit in the worker that trains; its model is empty."""
    packed: _Packed = pickle.loads(data)
    prepared = _candidate(context, packed)
    return Kit(
        prepared,
        packed.seed,
        packed.plan,
        packed.parts,
        packed.mixed,
        packed.between_steps,
        packed.first,
        packed.initial,
    )


def _candidate(context: WorkerContext, packed: _Packed) -> Prepared:
    if packed.parcel is not None:
        try:
            found: Prepared = unpack(packed.parcel)
            return found
        except Exception as error:
            if packed.origin is None:
                raise
            logger.info("the candidate cannot be unpacked, and is built again: %s", error)
    assert packed.origin is not None
    prepared = build_again(context, packed.origin)
    _check_same_model(prepared, packed)
    empty_parameters(prepared.candidate.model)
    return prepared


def _check_same_model(prepared: Prepared, packed: _Packed) -> None:
    """Raise CandidateError where a second build has made another model than the first."""
    planned = {field.name: field.shape for bundle in packed.plan.bundles for field in bundle.weights.fields}
    made = {name: tuple(parameter.shape) for name, parameter in prepared.candidate.model.named_parameters()}
    if made != planned:
        other = next(iter(sorted(dict(made.items() ^ planned.items()))))
        raise CandidateError(
            f"build makes another model when it is called again: parameter {other!r} differs",
            "let build depend on the trial and its seed alone, or use strategy whole",
        )
    if packed.initial and fingerprint(prepared.candidate.model) != packed.initial:
        raise CandidateError(
            "build makes other weights when it is called again with the same seed",
            "let build draw from torch's, NumPy's or Python's generators, which are seeded, or use strategy whole",
        )
