"""The loop of every exact strategy over all epochs: train, evaluate, report, checkpoint, save.

Strategies differ in how they train, not in the order of these steps. Each supplies an `InTraining`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from hydra_tune.strategies.base import Pruned, Reconsidered, TrialRun, never
from hydra_tune.training.progress import Progress

SLICE_SECONDS = 1.0
"""Duration of a training unit: short enough for trials to take turns, long enough to hide the cost of a turn."""


@dataclass(frozen=True)
class Loaded:
    """The start of training: metrics of the finished epochs, and notes on damaged checkpoints."""

    history: list[dict[str, float]]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SavedCheckpoint:
    """A written checkpoint, or the reason why it was not written."""

    step: int
    size: int
    seconds: float
    failure: str = ""


class InTraining(ABC):
    """A candidate in training; each method awaits units."""

    history: list[dict[str, float]]
    """Metrics of the epochs finished before training starts here."""

    @abstractmethod
    async def train(self, remaining: float | None) -> Progress:
        """Train for about a second, at most to the end of the epoch."""

    @abstractmethod
    async def end_epoch(self, remaining: float | None) -> dict[str, float]:
        """Evaluate the epoch and advance to the next. Return every metric."""

    @abstractmethod
    async def keep_weights(self) -> None:
        """Keep a copy of the current weights as the best so far."""

    @abstractmethod
    async def checkpoint(self) -> SavedCheckpoint:
        """Write the state that another search needs to resume from here."""

    def checkpoint_waits(self) -> bool:
        """True if a checkpoint would wait for a process that is busy."""
        return False

    @abstractmethod
    async def save(self) -> None:
        """Write the final weights."""


async def train_epochs(run: TrialRun, candidate: InTraining) -> None:
    """Train the candidate to its last epoch, then save its weights."""
    remaining: float | None = None
    best: float | None = None
    for metrics in candidate.history:
        best = metrics[run.metric] if run.better(metrics[run.metric], best) else best
    for epoch in range(len(candidate.history), run.blueprint.epochs):
        while True:
            progress = await candidate.train(remaining)
            run.progress(progress)
            remaining = run.remaining(progress) or remaining
            if progress.epoch_done:
                break
            if run.out_of_time() and _may_end(run, best):
                await candidate.save()
                return
            await _between_units(run, candidate, progress)
        metrics = await candidate.end_epoch(remaining)
        if run.blueprint.keep == "best" and run.better(metrics[run.metric], best):
            best = metrics[run.metric]
            await candidate.keep_weights()
        await run.report(epoch, metrics)
        if run.out_of_time():
            break
        await _between_units(run, candidate, progress, last=epoch + 1 == run.blueprint.epochs)
    await candidate.save()


def _may_end(run: TrialRun, best: float | None) -> bool:
    """True if a trial out of time may end mid-epoch: its best weights are kept. Raises Pruned in the first epoch."""
    if best is None:
        run.note("timeout", "out of time before its first epoch was over")
        raise Pruned
    return run.blueprint.keep == "best"


async def _between_units(run: TrialRun, candidate: InTraining, progress: Progress, *, last: bool = False) -> None:
    """Write a checkpoint if due, stop if the search stops, and raise Reconsidered if another strategy takes over."""
    moves = not last and run.reconsider(progress)
    if moves or run.checkpoint_due(waits=candidate.checkpoint_waits()):
        saved = await candidate.checkpoint()
        if saved.failure:
            run.checkpoint_failed(saved.failure)
            moves, run.reconsider = False, never  # no other strategy can continue without a checkpoint
        else:
            run.checkpoint_made(saved.step, saved.size, saved.seconds)
    run.stop_here()
    if moves:
        raise Reconsidered
