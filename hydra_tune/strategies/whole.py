"""Strategy `whole`: the plain training loop on one device, in slices of about a second.

Slices let more trials than devices take turns, and let a pruned trial go at once. The candidate's state stays in the
worker where it started; turns cost nothing but the round trip between two slices.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra_tune.builds import Prepared, receive
from hydra_tune.checkpoint import Checkpoints
from hydra_tune.devices import format_bytes
from hydra_tune.engine.unit import TrialEnded
from hydra_tune.engine.worker import WorkerContext
from hydra_tune.strategies.base import Strategy, TrialRun
from hydra_tune.strategies.epochs import SLICE_SECONDS, InTraining, Saved, train_epochs
from hydra_tune.training import Progress, Training


class OutOfMemory(TrialEnded):
    """A trial needs more than its device's budget."""

    status = "OUT_OF_MEMORY"

    def __init__(self, needed: int, budget: int, device: str) -> None:
        super().__init__(
            f"the trial needs {format_bytes(needed)} on {device}, whose budget is {format_bytes(budget)} "
            f"(train it in shards with --strategy shard, or give --device-memory {-(-needed // 2**20)}MiB or more)"
        )


class Unusable(TrialEnded):
    """A checkpoint does not fit the candidate: the attempt is lost, and the next one starts afresh."""

    status = "LOST"


@dataclass(frozen=True)
class Whole(Strategy):
    """Train the whole model on one device."""

    name = "whole"
    exact = True
    summary = "the whole model on one device, several models taking turns"

    async def train(self, run: TrialRun) -> None:
        because = run.blueprint.whole_because
        run.planned(self.name, shards=1, plan={"whole_because": because} if because else None)
        await train_epochs(run, await OnOneDevice.load(run))


@dataclass
class OnOneDevice(InTraining):
    """A whole candidate, resident in one worker."""

    run: TrialRun
    home: int
    history: list[dict[str, float]]

    @classmethod
    async def load(cls, run: TrialRun) -> OnOneDevice:
        """Bring the candidate to a device, with the state of an earlier attempt's newest checkpoint."""
        at, parcel = run.candidacy.worker, run.candidacy.parcel
        result = await run.unit("load", load, run.attempt, run.seed, parcel, run.checkpoints, worker=at)
        run.release_builder()
        loaded: Loaded = result.value
        await run.restored(loaded.history, loaded.notes)
        return cls(run, result.worker, loaded.history)

    async def train(self, remaining: float | None) -> Progress:
        progress: Progress = await self._unit("train", train_slice, SLICE_SECONDS, remaining=remaining)
        return progress

    async def end_epoch(self, remaining: float | None) -> dict[str, float]:
        metrics: dict[str, float] = await self._unit("evaluate", end_epoch, remaining=remaining)
        return metrics

    async def keep_weights(self) -> None:
        await self._unit("keep", keep_weights)

    async def checkpoint(self) -> Saved:
        saved: Saved = await self._unit("checkpoint", checkpoint, self.run.checkpoints)
        return saved

    async def save(self) -> None:
        await self._unit("save", save, self.run.weights, remaining=0.0)

    async def _unit(self, kind: str, work: Callable[..., Any], *args: Any, remaining: float | None = None) -> Any:
        run = self.run
        return (await run.unit(kind, work, run.attempt, *args, worker=self.home, remaining=remaining)).value


# What runs in the worker.


@dataclass(frozen=True)
class Loaded:
    """Where training starts: the metrics of the epochs behind it, and what was amiss with checkpoints."""

    history: list[dict[str, float]]
    notes: tuple[str, ...] = ()


def load(context: WorkerContext, attempt: str, seed: int, parcel: bytes | None, checkpoints: Path) -> Loaded:
    """Make the candidate ready to train here, whether it was built here or comes packed from the builder."""
    prepared: Prepared = context.resident[attempt] if parcel is None else receive(parcel)
    training = Training(prepared.candidate, prepared.train, prepared.valid, seed, context.device)
    context.resident[attempt] = training
    return restore(training, checkpoints)


def restore(training: Training, checkpoints: Path) -> Loaded:
    """Go on from the newest checkpoint that is whole, where there is one."""
    found = Checkpoints(checkpoints).newest()
    if found is None or found.state is None:
        return Loaded([], found.damaged if found else ())
    try:
        training.restore(found.state)
    except (ValueError, KeyError, RuntimeError) as error:
        # Half restored is worse than new, and a new one needs another build: the next attempt makes it.
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
    """Evaluate, and go to the next epoch."""
    training: Training = context.resident[attempt]
    return training.end_epoch()


def keep_weights(context: WorkerContext, attempt: str) -> None:
    """Remember this epoch's weights as the best so far."""
    training: Training = context.resident[attempt]
    training.keep_weights()


def checkpoint(context: WorkerContext, attempt: str, directory: Path) -> Saved:
    """Write all that another process needs to go on from here."""
    training: Training = context.resident[attempt]
    return write_checkpoint(directory, training.epoch * len(training.batches) + training.batch, training.state)


def write_checkpoint(directory: Path, step: int, state: Callable[[], dict[str, Any]]) -> Saved:
    """Write a state, or say why that failed."""
    began = time.perf_counter()
    try:
        size = Checkpoints(directory).save(step, state())
    except Exception as error:  # noqa: BLE001 - user code may keep anything in a model; training is worth more
        return Saved(step, 0, 0.0, failure=str(error) or type(error).__name__)
    return Saved(step, size, time.perf_counter() - began)


def save(context: WorkerContext, attempt: str, path: Path) -> None:
    """Write the weights to keep."""
    training: Training = context.resident[attempt]
    training.save(path)
