"""The loop of every exact strategy, from the first epoch to the last: train, judge, report, checkpoint, save.

Strategies differ in how a piece of training runs, not in the order of things; what a strategy has to supply is the
`InTraining` below.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from hydra_tune.strategies.base import Pruned, Reconsidered, TrialRun, never
from hydra_tune.training import Progress

SLICE_SECONDS = 1.0
"""How long a unit of training lasts: short enough for trials to take turns, long enough to hide what turns cost."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written, or why it was not."""

    step: int
    size: int
    seconds: float
    failure: str = ""


class InTraining(ABC):
    """A candidate in training; each method awaits units."""

    history: list[dict[str, float]]
    """The metrics of the epochs behind it when training starts here."""

    @abstractmethod
    async def train(self, remaining: float | None) -> Progress:
        """Train for about a second, at most to the end of the epoch."""

    @abstractmethod
    async def end_epoch(self, remaining: float | None) -> dict[str, float]:
        """Judge the epoch, and go to the next one. Returns every metric."""

    @abstractmethod
    async def keep_weights(self) -> None:
        """Remember the weights as they are now, as the best so far."""

    @abstractmethod
    async def checkpoint(self) -> Saved:
        """Write all that another search needs to go on from here."""

    def checkpoint_waits(self) -> bool:
        """Whether somebody else is served before a checkpoint would be written."""
        return False

    @abstractmethod
    async def save(self) -> None:
        """Write the weights to keep."""


async def train_epochs(run: TrialRun, candidate: InTraining) -> None:
    """Train the candidate to its last epoch, and leave its weights."""
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
    """Whether a trial that is out of time can end within an epoch: its best one is kept, or none is over yet."""
    if best is None:
        run.note("timeout", "out of time before its first epoch was over")
        raise Pruned
    return run.blueprint.keep == "best"


async def _between_units(run: TrialRun, candidate: InTraining, progress: Progress, *, last: bool = False) -> None:
    """Checkpoint where that is due, stop where the search stops, and let another strategy go on where one is to."""
    moves = not last and run.reconsider(progress)
    if moves or run.checkpoint_due(waits=candidate.checkpoint_waits()):
        saved = await candidate.checkpoint()
        if saved.failure:
            run.checkpoint_failed(saved.failure)
            moves, run.reconsider = False, never  # without a checkpoint nobody else can go on
        else:
            run.checkpoint_made(saved.step, saved.size, saved.seconds)
    run.stop_here()
    if moves:
        raise Reconsidered
