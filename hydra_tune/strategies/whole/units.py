"""Units of a `whole` trial, run in the worker that holds it: load, train, evaluate, checkpoint, save."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra_tune.core.devices import format_bytes
from hydra_tune.engine.unit import TrialEnded
from hydra_tune.engine.worker import WorkerContext
from hydra_tune.strategies.epochs import Loaded, SavedCheckpoint
from hydra_tune.training.checkpoint import Checkpoints
from hydra_tune.training.loop import Training
from hydra_tune.training.prepared import Prepared, receive
from hydra_tune.training.progress import Progress


class OutOfMemory(TrialEnded):
    """The trial needs more memory than its device's budget."""

    status = "OUT_OF_MEMORY"

    def __init__(self, needed: int, budget: int, device: str) -> None:
        super().__init__(
            f"the trial needs {format_bytes(needed)} on {device}, whose budget is {format_bytes(budget)} "
            f"(train it in shards with --strategy shard, or give --device-memory {-(-needed // 2**20)}MiB or more)"
        )


class Unusable(TrialEnded):
    """A checkpoint does not match the candidate: the attempt is lost, and the next one starts from scratch."""

    status = "LOST"


def load(context: WorkerContext, attempt: str, seed: int, parcel: bytes | None, checkpoints: Path) -> Loaded:
    """Prepare the candidate for training, built in this worker or packed by the builder; resume from a checkpoint."""
    prepared: Prepared = context.resident[attempt] if parcel is None else receive(parcel)
    training = Training(prepared.candidate, prepared.train, prepared.valid, seed, context.device)
    context.resident[attempt] = training
    return restore(training, checkpoints)


def restore(training: Training, checkpoints: Path) -> Loaded:
    """Resume from the newest undamaged checkpoint, if there is one."""
    found = Checkpoints(checkpoints).newest()
    if found is None or found.state is None:
        return Loaded([], found.damaged if found else ())
    try:
        training.restore(found.state)
    except (ValueError, KeyError, RuntimeError) as error:
        # A half-restored model is unusable, and a fresh one needs another build, which the next attempt makes.
        Checkpoints(checkpoints).remove()
        raise Unusable(
            f"the checkpoint of step {found.step} cannot be used ({error}); the trial starts again"
        ) from error
    return Loaded(training.history, found.damaged)


def train_slice(context: WorkerContext, attempt: str, seconds: float) -> Progress:
    """Train for about `seconds`, at most to the end of the epoch."""
    training: Training = context.resident[attempt]
    progress = training.train_for(seconds)
    context.unit_peak_bytes = training.peak_bytes
    if training.peak_bytes > context.setup.memory:
        raise OutOfMemory(training.peak_bytes, context.setup.memory, context.setup.device)
    return progress


def end_epoch(context: WorkerContext, attempt: str) -> dict[str, float]:
    """Evaluate, and advance to the next epoch. Return every metric."""
    training: Training = context.resident[attempt]
    return training.end_epoch()


def keep_weights(context: WorkerContext, attempt: str) -> None:
    """Keep a copy of this epoch's weights as the best so far."""
    training: Training = context.resident[attempt]
    training.keep_weights()


def checkpoint(context: WorkerContext, attempt: str, directory: Path) -> SavedCheckpoint:
    """Write the state that another process needs to resume from here."""
    training: Training = context.resident[attempt]
    return write_checkpoint(directory, training.epoch * len(training.batches) + training.batch, training.state)


def write_checkpoint(directory: Path, step: int, state: Callable[[], dict[str, Any]]) -> SavedCheckpoint:
    """Write a checkpoint; on failure, return the reason instead of raising."""
    began = time.perf_counter()
    try:
        size = Checkpoints(directory).save(step, state())
    except Exception as error:  # noqa: BLE001 - user code may keep anything in a model; training is worth more
        return SavedCheckpoint(step, 0, 0.0, failure=str(error) or type(error).__name__)
    return SavedCheckpoint(step, size, time.perf_counter() - began)


def save(context: WorkerContext, attempt: str, path: Path) -> None:
    """Write the final weights."""
    training: Training = context.resident[attempt]
    training.save(path)
