"""Training in rounds: in each, every subnet trains by itself for some steps, then their results are merged.

Within a round the subnets are independent units that any device may take, so their number does not depend on the number
of devices. A unit whose worker is lost is repeated, with the same result; or it is skipped, and its part of the model
stays unchanged for this round. Strategies `ist` and `elastic` (in mode `sync`) train in rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from hydra_tune.core.errors import WorkerLost
from hydra_tune.engine.remote import remote
from hydra_tune.engine.unit import Role, UnitResult
from hydra_tune.strategies.base import TrialRun
from hydra_tune.strategies.concurrent_units import all_of
from hydra_tune.strategies.epochs import SLICE_SECONDS, InTraining, SavedCheckpoint
from hydra_tune.strategies.recovery import Recovery
from hydra_tune.strategies.subnets.work import PhaseDone, SubnetLayout, SubnetRequest, share_of
from hydra_tune.training.progress import Progress

if TYPE_CHECKING:
    from hydra_tune.strategies.subnets import units as units
else:
    units = remote("hydra_tune.strategies.subnets.units")


@dataclass
class InRounds(InTraining):
    """A candidate whose state is in the spill store between rounds."""

    run: TrialRun
    wanted: SubnetRequest
    laid: SubnetLayout
    skips: bool
    """True if a lost subnet is skipped for the round at once."""
    history: list[dict[str, float]]
    account: list[dict[str, Any]] = field(default_factory=list)
    """Counts of each finished epoch."""

    @classmethod
    async def laid_out(cls, run: TrialRun, wanted: SubnetRequest, *, skips: bool) -> Self:
        """Lay out a candidate that waits in the builder, with the state of its newest checkpoint."""
        builder = run.candidacy.worker
        assert builder is not None
        result = await run.unit(
            "lay out", units.lay_out, run.attempt, run.number, run.seed, wanted, run.checkpoints, role=Role.BUILDER,
            worker=builder,
        )  # fmt: skip
        laid: SubnetLayout = result.value
        run.communicated(sum(epoch.get("bytes", 0) for epoch in (*laid.account, laid.current)))
        made = cls(run, wanted, laid, skips, list(laid.history), account=list(laid.account))
        if wanted.pinned:
            looks = await all_of(made._unit("look", units.look, i, index=i) for i in range(wanted.subnets))
            made.shares = [result.value for result in looks]
        return made

    def __post_init__(self) -> None:
        at = self.laid.position
        self.turn: int = at["turn"]
        self.epoch: int = at["epoch"]
        self.batch: int = at["batch"]
        """Batches of this epoch that every subnet has finished."""
        self.steps: int = at["steps"]
        self._loss = at["loss_sum"], at["loss_rows"]
        self.shares = [share_of(self.laid.batches, i, self.wanted.subnets) for i in range(self.wanted.subnets)]
        """Batches per epoch of each subnet."""
        self.current: dict[str, Any] = self._nothing_yet() | self.laid.current
        """Counts of this epoch: rounds, lost phases, bytes communicated."""

    def _nothing_yet(self) -> dict[str, Any]:
        return {"rounds": 0, "subnets": self.wanted.subnets, "lost": 0, "bytes": 0}

    # Training

    async def train(self, remaining: float | None) -> Progress:
        began, first = time.perf_counter(), self._batches_done()
        while self.batch < max(self.shares):
            await self._round(remaining)
            if time.perf_counter() - began >= SLICE_SECONDS:
                break
        total, rows = self._loss
        return Progress(
            epoch=self.epoch, batch=self._batches_done(), batches=sum(self.shares), steps=self.steps,
            loss=total / max(rows, 1), batches_done=self._batches_done() - first, seconds=time.perf_counter() - began,
        )  # fmt: skip

    async def _round(self, remaining: float | None) -> None:
        """Train every subnet that has batches left, then merge their results into the trial's state."""
        busy = [index for index in range(self.wanted.subnets) if self.shares[index] > self.batch]
        done = [phase for phase in await all_of(self._phase(index, remaining) for index in busy) if phase is not None]
        if not done:
            raise WorkerLost(f"every subnet of round {self.turn} was lost")
        await self._unit("assemble", units.assemble, self.turn, [phase.index for phase in done], remaining=remaining)
        self._loss = self._loss[0] + sum(p.loss_sum for p in done), self._loss[1] + sum(p.rows for p in done)
        moved = sum(phase.bytes for phase in done)
        self.run.communicated(moved)
        self.current["bytes"] += moved
        self.current["rounds"] += 1
        self.turn += 1
        self.steps += self.wanted.local_steps
        self.batch += self.wanted.local_steps * self.laid.accumulate

    async def _phase(self, index: int, remaining: float | None) -> PhaseDone | None:
        """Run one subnet's phase; None if it was lost and is skipped."""
        recovery = Recovery()
        while True:
            try:
                result = await self.run.unit(
                    "train", units.train_subnet, self.run.attempt, self.laid.spot, self.turn, index,
                    worker=self._home(index), remaining=remaining,
                )  # fmt: skip
            except WorkerLost as error:
                self.current["lost"] += 1
                again = not self.skips and recovery.again()
                what = "is run again" if again else "is skipped for this round"
                self.run.note("lost", f"{error}; subnet {index} of round {self.turn} {what}")
                if not again:
                    return None
            else:
                done: PhaseDone = result.value
                return done

    def _home(self, index: int | None) -> int | None:
        """Return the worker that may read a subnet's pinned data, always on the same device; None if not pinned."""
        if not self.wanted.pinned or index is None:
            return None
        workers = self.run.engine.workers_of_all_devices()
        return workers[index % len(workers)]

    def _batches_done(self) -> int:
        return sum(min(self.batch, share) for share in self.shares)

    # Epochs

    async def end_epoch(self, remaining: float | None) -> dict[str, float]:
        if self.wanted.pinned:
            every = range(self.wanted.subnets)
            await all_of(self._unit("statistics", units.partition_statistics, i, index=i) for i in every)
        result = await self._unit("evaluate", units.end_epoch, self.epoch, self.current, remaining=remaining)
        metrics: dict[str, float] = result.value
        self.account.append(self.current)
        self.epoch, self.batch, self._loss = self.epoch + 1, 0, (0.0, 0)
        self.current = self._nothing_yet()
        return metrics

    async def keep_weights(self) -> None:
        await self._unit("keep", units.keep_weights)

    async def checkpoint(self) -> SavedCheckpoint:
        saved: SavedCheckpoint = (
            await self._unit("checkpoint", units.checkpoint, self.run.checkpoints, self.current)
        ).value
        return saved

    async def save(self) -> None:
        await self._unit("save", units.save, self.run.weights, remaining=0.0)

    async def _unit(
        self, kind: str, work: Callable[..., Any], *args: Any, index: int | None = None, remaining: float | None = None
    ) -> UnitResult:
        """Run a unit of the trial on any device, or of a subnet; a lost unit is repeated from the last commit."""
        given = (self.run.attempt, self.laid.spot, *args)
        recovery = Recovery()
        while True:
            try:
                return await self.run.unit(kind, work, *given, worker=self._home(index), remaining=remaining)
            except WorkerLost as error:
                if not recovery.again():
                    raise
                self.run.note("lost", f"{error}; {kind} is run again")
