"""Strategy `pack`: trials of one shape train as one batched model, and come apart again.

Each trial is a coroutine of its own, with its own reports, pruning and checkpoints; only its training units are shared
with the other trials on its bench. A trial that cannot be packed, or has no companion, is trained by the plain loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hydra_tune.core.errors import SpecError
from hydra_tune.core.tables import Table
from hydra_tune.engine.remote import remote
from hydra_tune.engine.unit import Memory, Unit
from hydra_tune.strategies.base import Strategy, TrialRun
from hydra_tune.strategies.epochs import SLICE_SECONDS, InTraining, SavedCheckpoint, train_epochs
from hydra_tune.strategies.estimate import Estimate, Look
from hydra_tune.strategies.pack.bench import Room, Seat
from hydra_tune.strategies.pack.plan_table import plan_of, shown
from hydra_tune.strategies.pack.turn import Arrived
from hydra_tune.strategies.pool import Pool
from hydra_tune.training.progress import Progress

if TYPE_CHECKING:
    from hydra_tune.strategies.pack import units as units
else:
    units = remote("hydra_tune.strategies.pack.units")

SIZE = 32
"""Most members of a pack by default: beyond, little is gained and all wait for each other."""
AHEAD = 8
"""Trials that may be on their way to a pack, besides those that are in one."""
RETRIED = "an attempt was lost, and the trial may be what kills workers"


class _Units(Room):
    """The benches of a search, whose turns are units of this strategy."""

    def unit(
        self, lead: TrialRun, runs: Sequence[TrialRun], keep: Sequence[str], worker: int, remaining: float | None
    ) -> Unit:
        return Unit(
            trial=lead.number, attempt=lead.attempt, kind="train", work=units.train,
            args=([run.attempt for run in runs], keep, SLICE_SECONDS), worker=worker, remaining=remaining,
            deadline=lead.deadline("train"), memory=lead.memory,
            members=tuple(run.number for run in runs) if len(runs) > 1 else (),
        )  # fmt: skip


@dataclass(frozen=True)
class Pack(Strategy):
    """Train trials of one shape together, as one batched model."""

    size: int = SIZE
    """Most trials in a pack."""
    _room: Room = field(default_factory=_Units, init=False, repr=False, compare=False)

    name = "pack"
    exact = True
    summary = "small models of one shape trained as one, each with its own numbers"
    simpler = ()
    parts = "members"
    begin_seconds = 0.5

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise SpecError(f"option size of strategy 'pack' cannot be {self.size!r}", "give a whole number from 1")

    def trials_at_once(self, devices: int) -> int:
        """Return how many trials may be in flight: more as long as they share benches."""
        ahead = 0 if len(self._room.benches) > devices else AHEAD  # of too many shapes, more would only take turns
        return min(self.size * devices + 1, max(devices + 1, len(self._room.seats) + ahead))

    def joined(self, devices: int) -> int:
        seats, benches = len(self._room.seats), len(self._room.benches)
        return min((self.size - 1) * devices, seats) if benches <= devices else seats - benches

    @classmethod
    def estimate(cls, look: Look, pool: Pool) -> Estimate:
        from hydra_tune.strategies.pack.estimate import estimate  # imports torch, so only in workers

        return estimate(look, pool)

    @classmethod
    def memory(cls, estimate: Estimate, *, alone: bool) -> Memory | None:
        members = max(1, estimate.parts)
        return Memory(estimate.device_bytes // members, estimate.held_bytes // members)

    @classmethod
    def describe_plan(cls, plan: Mapping[str, Any]) -> Iterable[str | Table]:
        return shown(plan)

    async def train(self, run: TrialRun) -> None:
        seat = Seat(run, -1)
        run.planned(self.name, shards=1)
        try:
            await train_epochs(run, await InPack.load(run, seat, self))
        finally:
            self._room.leave(seat)
            run.planned(self.name, shards=1, plan=plan_of(seat))
            run.room_for_more()

    @property
    def room(self) -> Room:
        return self._room


@dataclass
class InPack(InTraining):
    """A candidate in training on a bench."""

    run: TrialRun
    seat: Seat
    room: Room
    history: list[dict[str, float]]
    _metrics: dict[str, float] = field(default_factory=dict)

    @classmethod
    async def load(cls, run: TrialRun, seat: Seat, strategy: Pack) -> InPack:
        """Load the candidate on a device, and find its bench there."""
        room, parcel, home = strategy.room, run.candidacy.parcel, run.candidacy.worker
        if parcel is not None or home is None:
            home = room.place(run.engine.workers_of_all_devices(), run.signature, strategy.size)
        size = min(strategy.size, run.members) if run.signature else strategy.size
        seat.worker = home
        room.enter(seat)
        run.room_for_more()
        result = await run.unit("load", units.load, run.attempt, run.seed, parcel, run.checkpoints, worker=home)
        run.release_builder()
        arrived: Arrived = result.value
        await run.restored(arrived.loaded.history, arrived.loaded.notes)
        seat.refused = RETRIED if run.retried else arrived.refused
        seat.batch, seat.signature = arrived.batch, "" if seat.refused else arrived.signature
        room.sit(seat, size)
        run.room_for_more()
        return cls(run, seat, room, arrived.loaded.history)

    async def train(self, remaining: float | None) -> Progress:
        trained = await self.room.bench_of(self.seat).train(self.seat, remaining)
        assert trained.progress is not None
        self._metrics = trained.metrics or {}
        return trained.progress

    async def end_epoch(self, remaining: float | None) -> dict[str, float]:
        return self._metrics  # evaluated at the end of the turn

    async def keep_weights(self) -> None:
        self.seat.keep = True  # done by the next unit

    async def checkpoint(self) -> SavedCheckpoint:
        run = self.run
        saved: SavedCheckpoint = (
            await run.unit(
                "checkpoint", units.checkpoint, run.attempt, self.seat.take_keep(), run.checkpoints,
                worker=self.seat.worker,
            )
        ).value  # fmt: skip
        return saved

    async def save(self) -> None:
        run = self.run
        await run.unit(
            "save", units.save, run.attempt, self.seat.take_keep(), run.weights, worker=self.seat.worker, remaining=0.0
        )
