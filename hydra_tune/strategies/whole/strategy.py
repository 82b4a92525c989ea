"""Strategy `whole`: the plain training loop on one device, in slices of about a second.

Slices let more trials than devices take turns, and let a pruned trial end at once. The candidate's state stays in the
worker where it started, so a turn costs only the round trip between two slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra_tune.core.tables import Table
from hydra_tune.engine.remote import remote
from hydra_tune.engine.unit import Memory
from hydra_tune.strategies.base import Strategy, TrialRun
from hydra_tune.strategies.epochs import SLICE_SECONDS, InTraining, Loaded, SavedCheckpoint, train_epochs
from hydra_tune.strategies.estimate import Estimate, Look
from hydra_tune.strategies.pool import Pool
from hydra_tune.training.progress import Progress

if TYPE_CHECKING:
    from hydra_tune.strategies.whole import units as units
else:
    units = remote("hydra_tune.strategies.whole.units")


@dataclass(frozen=True)
class Whole(Strategy):
    """Train the whole model on one device."""

    name = "whole"
    exact = True
    summary = "the whole model on one device, several models taking turns"
    simpler = ()
    soon_done = "it fits a device, and is soon done"
    begin_seconds = 0.5

    @classmethod
    def estimate(cls, look: Look, pool: Pool) -> Estimate:
        from hydra_tune.strategies.whole.estimate import estimate  # imports torch, so only in workers

        return estimate(look, pool)

    @classmethod
    def memory(cls, estimate: Estimate, *, alone: bool) -> Memory | None:
        return Memory(estimate.device_bytes, estimate.held_bytes, alone=alone) if estimate.device_bytes else None

    @classmethod
    def describe_plan(cls, plan: Mapping[str, Any]) -> Iterable[str | Table]:
        yield f"trained as a whole: {plan['whole_because']}"

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
        """Load the candidate on a device, with the state of the newest checkpoint of an earlier attempt."""
        at, parcel = run.candidacy.worker, run.candidacy.parcel
        result = await run.unit("load", units.load, run.attempt, run.seed, parcel, run.checkpoints, worker=at)
        run.release_builder()
        loaded: Loaded = result.value
        await run.restored(loaded.history, loaded.notes)
        return cls(run, result.worker, loaded.history)

    async def train(self, remaining: float | None) -> Progress:
        progress: Progress = await self._unit("train", units.train_slice, SLICE_SECONDS, remaining=remaining)
        return progress

    async def end_epoch(self, remaining: float | None) -> dict[str, float]:
        metrics: dict[str, float] = await self._unit("evaluate", units.end_epoch, remaining=remaining)
        return metrics

    async def keep_weights(self) -> None:
        await self._unit("keep", units.keep_weights)

    async def checkpoint(self) -> SavedCheckpoint:
        saved: SavedCheckpoint = await self._unit("checkpoint", units.checkpoint, self.run.checkpoints)
        return saved

    async def save(self) -> None:
        await self._unit("save", units.save, self.run.weights, remaining=0.0)

    async def _unit(self, kind: str, work: Callable[..., Any], *args: Any, remaining: float | None = None) -> Any:
        run = self.run
        return (await run.unit(kind, work, run.attempt, *args, worker=self.home, remaining=remaining)).value
