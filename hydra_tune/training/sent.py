"""Sends a built candidate from the builder to the workers that train it, with what its strategy adds.

The candidate travels as a pickle where a copy is the same. Where a copy would lack something (hooks of parameters) or
cannot be made (parametrized modules), the worker builds the candidate again, and a fingerprint of the weights tells
whether it is the same one.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
from torch import nn

from hydra_tune.core.errors import CandidateError
from hydra_tune.engine.worker import WorkerContext
from hydra_tune.training.builds import build_again
from hydra_tune.training.prepared import Origin, Prepared, fingerprint, packed_candidate, receive

logger = logging.getLogger(__name__)
Shapes = Mapping[str, tuple[int, ...]]
"""Shape of each parameter by name."""


@dataclass(frozen=True)
class _Parcel:
    """A candidate as a pickle or as the build that makes it again, and the pickle of what goes with it."""

    candidate: bytes | None
    origin: Origin | None
    initial: str
    shapes: Shapes
    rest: bytes


def shapes_of_parameters(model: nn.Module) -> Shapes:
    """Return the shape of each parameter, to recognise the model by."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def packed_for_workers(context: WorkerContext, prepared: Prepared, initial: str, shapes: Shapes, rest: Any) -> bytes:
    """Pack a candidate whose model is empty, and `rest`, for any worker of this run.

    `initial` is the fingerprint of the weights that the build made, empty if unknown.
    """
    try:
        parcel: bytes | None = packed_candidate(context, prepared)
    except CandidateError as error:
        if prepared.origin is None:
            raise
        logger.info("devices build the candidate again: %s", error)
        parcel = None
    found: bytes = cloudpickle.dumps(_Parcel(parcel, prepared.origin, initial, shapes, cloudpickle.dumps(rest)))
    return found


def unpacked_in_worker(context: WorkerContext, data: bytes) -> tuple[Prepared, Any]:
    """Return the candidate and what came with it; the model is empty, or has the weights of its build."""
    parcel: _Parcel = pickle.loads(data)
    return _candidate(context, parcel), pickle.loads(parcel.rest)


def _candidate(context: WorkerContext, parcel: _Parcel) -> Prepared:
    if parcel.candidate is not None:
        try:
            return receive(context, parcel.candidate)
        except Exception as error:
            if parcel.origin is None:
                raise
            logger.info("the candidate cannot be unpacked, and is built again: %s", error)
    assert parcel.origin is not None
    prepared = build_again(context, parcel.origin)
    _check_same_model(prepared.candidate.model, parcel)
    return prepared


def _check_same_model(model: nn.Module, parcel: _Parcel) -> None:
    """Raise CandidateError where a second build has made another model than the first."""
    made = shapes_of_parameters(model)
    if made != parcel.shapes:
        other = next(iter(sorted(dict(made.items() ^ parcel.shapes.items()))))
        raise CandidateError(
            f"build makes another model when it is called again: parameter {other!r} differs",
            "let build depend on the trial and its seed alone, or use strategy whole",
        )
    if parcel.initial and fingerprint(model) != parcel.initial:
        raise CandidateError(
            "build makes other weights when it is called again with the same seed",
            "let build draw from torch's, NumPy's or Python's generators, which are seeded, or use strategy whole",
        )
