"""Strategy `whole`: the plain training loop on one device, in slices of about a second.

Slices let more trials than devices take turns, and let a pruned trial go at once. The candidate's state stays in the
worker where it started; turns cost nothing but the round trip between two slices.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from hydra_tune.builds import Prepared, receive
from hydra_tune.checkpoint import Checkpoints
from hydra_tune.devices import format_bytes
from hydra_tune.engine.unit import TrialEnded
from hydra_tune.engine.worker import WorkerContext
from hydra_tune.strategies.base import Strategy, TrialRun
from hydra_tune.training import Progress, Training

SLICE_SECONDS = 1.0


class OutOfMemory(TrialEnded):
    """A trial needs more than its device's budget."""

    status = "OUT_OF_MEMORY"

    def __init__(self, needed: int, budget: int, device: str) -> None:
        super().__init__(
            f"the trial needs {format_bytes(needed)} on {device}, whose budget is {format_bytes(budget)} "
            f"(give --device-memory {-(-needed // 2**20)}MiB or more)"
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
        home, loaded = await self._load(run)
        remaining: float | None = None
        best: float | None = None
        for metrics in loaded.history:
            best = metrics[run.metric] if run.better(metrics[run.metric], best) else best
        for epoch in range(len(loaded.history), run.blueprint.epochs):
            while True:
                done = await run.unit(
                    "train", train_slice, run.attempt, SLICE_SECONDS, worker=home, remaining=remaining
                )
                progress: Progress = done.value
                run.progress(progress)
                remaining = _remaining_seconds(progress, run.blueprint.epochs, remaining)
                if progress.epoch_done:
                    break
                await self._checkpoint(run, home, remaining)
            metrics = (await run.unit("evaluate", end_epoch, run.attempt, worker=home, remaining=remaining)).value
            if run.blueprint.keep == "best" and run.better(metrics[run.metric], best):
                best = metrics[run.metric]
                await run.unit("keep", keep_weights, run.attempt, worker=home, remaining=remaining)
            await run.report(epoch, metrics)
            await self._checkpoint(run, home, remaining)
        await run.unit("save", save, run.attempt, run.weights, worker=home, remaining=0.0)

    async def _load(self, run: TrialRun) -> tuple[int, Loaded]:
        """Bring the candidate to a device, with the state of an earlier attempt's newest checkpoint."""
        at, parcel = run.candidacy.worker, run.candidacy.parcel
        result = await run.unit("load", load, run.attempt, run.seed, parcel, run.checkpoints, worker=at)
        run.release_builder()
        loaded: Loaded = result.value
        await run.restored(loaded.history, loaded.notes)
        return result.worker, loaded

    async def _checkpoint(self, run: TrialRun, home: int, remaining: float | None) -> None:
        if run.checkpoint_due():
            made = await run.unit(
                "checkpoint", checkpoint, run.attempt, run.checkpoints, worker=home, remaining=remaining
            )
            saved: Saved = made.value
            if saved.failure:
                run.checkpoint_failed(saved.failure)
            else:
                run.checkpoint_made(saved.step, saved.size, saved.seconds)
        run.stop_here()


def _remaining_seconds(progress: Progress, epochs: int, before: float | None) -> float | None:
    """Seconds of training left at the pace of this slice."""
    if not progress.batches_done:
        return before
    left = (epochs - progress.epoch) * progress.batches - progress.batch
    return left * progress.seconds / progress.batches_done


# What runs in the worker.


@dataclass(frozen=True)
class Loaded:
    """Where training starts: the metrics of the epochs behind it, and what was amiss with checkpoints."""

    history: list[dict[str, float]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written, or why it was not."""

    step: int
    size: int
    seconds: float
    failure: str = ""


def load(context: WorkerContext, attempt: str, seed: int, parcel: bytes | None, checkpoints: Path) -> Loaded:
    """Make the candidate ready to train here, whether it was built here or comes packed from the builder."""
    prepared: Prepared = context.resident[attempt] if parcel is None else receive(parcel)
    training = Training(prepared.candidate, prepared.train, prepared.valid, seed, context.device)
    context.resident[attempt] = training
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
    began = time.perf_counter()
    step = training.epoch * len(training.batches) + training.batch
    try:
        size = Checkpoints(directory).save(step, training.state())
    except Exception as error:  # noqa: BLE001 - user code may keep anything in a model; training is worth more
        return Saved(step, 0, 0.0, failure=str(error) or type(error).__name__)
    return Saved(step, size, time.perf_counter() - began)


def save(context: WorkerContext, attempt: str, path: Path) -> None:
    """Write the weights to keep."""
    training: Training = context.resident[attempt]
    training.save(path)
