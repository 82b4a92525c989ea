"""Gathers trials of one signature on each device, and lets them train together, turn by turn.

A seat is a trial on a device. Trials of one signature on one device share a bench; it takes its next turn when all
of them wait for it, so that each has been reported, pruned or checkpointed by then. Trials that arrive wait for
the end of an epoch. Runs in the coordinator's event loop; knows nothing of tensors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from hydra_tune.engine.unit import Unit, UnitFailed
from hydra_tune.strategies.base import TrialRun
from hydra_tune.strategies.pack.turn import Trained, Turn


@dataclass(eq=False)
class Seat:
    """One trial on its device."""

    run: TrialRun
    worker: int
    signature: str = ""
    """Empty while unknown, and for a trial that trains alone."""
    batch: int = 0
    """Batches of the current epoch that are trained."""
    keep: bool = False
    """True if the present weights are those of the best epoch, and not yet kept."""
    remaining: float | None = None
    turns: int = 0
    companions: set[int] = field(default_factory=set)
    """Numbers of the trials that shared a turn with it."""
    most: int = 1
    """Most members in a turn, itself included."""
    sum_of_members: int = 0
    refused: str = ""
    """Reason why the trial trains alone."""
    waiting: asyncio.Future[Trained] | None = None

    @property
    def mean_members(self) -> float:
        return self.sum_of_members / self.turns if self.turns else 1.0

    def answer(self, result: Trained | Exception) -> None:
        """Wake the trial up with its result; it waits no longer, even before it has woken up."""
        future, self.waiting = self.waiting, None
        if future is None or future.done():
            return
        if isinstance(result, Trained):
            future.set_result(result)
        else:
            future.set_exception(result)

    def take_keep(self) -> bool:
        """Return whether weights are to be kept now; the caller has that done."""
        keep, self.keep = self.keep, False
        return keep

    def shared(self, members: Sequence[Seat]) -> None:
        """Count a turn with these members."""
        self.turns += 1
        self.sum_of_members += len(members)
        self.most = max(self.most, len(members))
        self.companions.update(each.run.number for each in members if each is not self)


def choose(seats: Sequence[Seat], size: int) -> list[Seat]:
    """Return the seats of the next turn, at most `size`: those amid an epoch first, then those with the fewest turns.

    Members train the same batch of an epoch, so the seats at the most advanced batch go together.
    """
    batch = max(seat.batch for seat in seats)
    there = [seat for seat in seats if seat.batch == batch]
    return sorted(there, key=lambda seat: (seat.turns, seat.run.number))[:size]


@dataclass(eq=False)
class Bench:
    """The seats of one signature on one device."""

    room: Room
    seats: list[Seat] = field(default_factory=list)
    size: int = 1
    """Most members of a turn."""
    _turn: asyncio.Task[None] | None = None

    async def train(self, seat: Seat, remaining: float | None) -> Trained:
        """Take part in the next turns until one includes this seat; return what came of it."""
        seat.remaining = remaining
        future: asyncio.Future[Trained] = asyncio.get_running_loop().create_future()
        seat.waiting = future
        self.look()
        try:
            return await future
        finally:
            seat.waiting = None

    def look(self) -> None:
        """Begin the next turn if every seat waits for it."""
        if self._turn is None and self.seats and all(seat.waiting is not None for seat in self.seats):
            members = choose(self.seats, self.size)
            self._turn = asyncio.create_task(self._take_turn(members), name=f"pack of {len(members)}")

    def end(self) -> None:
        """Give up a turn that nobody waits for any more, as when a search is cancelled."""
        if self._turn is not None:
            self._turn.cancel()

    async def _take_turn(self, members: list[Seat]) -> None:
        try:
            turn = await self._run(members)
        except Exception as error:  # noqa: BLE001 - a failed or lost unit ends it for each member
            self._turn = None
            for seat in members:
                seat.answer(error)
            return
        self._turn = None
        if turn.fits is not None:
            self.size = min(self.size, turn.fits)
        if turn.refused:
            self.room.alone(members, turn.refused)
            return
        for seat in members:
            seat.shared(members)
            self._answer(seat, turn.results[seat.run.attempt])
        self.look()

    async def _run(self, members: Sequence[Seat]) -> Turn:
        keep = [seat.run.attempt for seat in members if seat.take_keep()]
        lead = members[0].run
        unit = self.room.unit(lead, [seat.run for seat in members], keep, members[0].worker, _longest(members))
        result = await lead.engine.run(unit)
        lead.measured(unit.kind, result.seconds)
        turn: Turn = result.value
        return turn

    def _answer(self, seat: Seat, trained: Trained) -> None:
        if trained.failure is not None:
            seat.answer(UnitFailed(trained.failure))
            return
        assert trained.progress is not None
        seat.batch = 0 if trained.progress.epoch_done else trained.progress.batch
        seat.answer(trained)


def _longest(members: Sequence[Seat]) -> float | None:
    known = [seat.remaining for seat in members if seat.remaining is not None]
    return max(known, default=None)


class Room:
    """All benches of a search."""

    def __init__(self) -> None:
        self.seats: list[Seat] = []
        self.benches: dict[tuple[int, str], Bench] = {}

    def unit(
        self, lead: TrialRun, runs: Sequence[TrialRun], keep: Sequence[str], worker: int, remaining: float | None
    ) -> Unit:
        """Return the unit of a turn; set by the strategy, which knows the function."""
        raise NotImplementedError

    def place(self, workers: Sequence[int], signature: str, size: int) -> int:
        """Return the worker for a trial: an idle one, else one with a bench of its signature and room, else any.

        Among several, the one with fewest seats.
        """
        seats = {worker: sum(seat.worker == worker for seat in self.seats) for worker in workers}
        idle = [worker for worker in workers if not seats[worker]]
        same = [worker for worker in workers if self._has_room(worker, signature, size)]
        return min(idle or same or workers, key=seats.__getitem__)

    def _has_room(self, worker: int, signature: str, size: int) -> bool:
        bench = self.benches.get((worker, signature))
        return bool(signature) and bench is not None and len(bench.seats) < size

    def enter(self, seat: Seat) -> None:
        """Add a trial that is about to be loaded."""
        self.seats.append(seat)

    def sit(self, seat: Seat, size: int) -> Bench:
        """Put a loaded trial onto its bench; one without a signature has a bench of its own."""
        key = (seat.worker, seat.signature or f"alone {seat.run.attempt}")
        bench = self.benches.setdefault(key, Bench(self, size=size))
        bench.seats.append(seat)
        return bench

    def bench_of(self, seat: Seat) -> Bench:
        return next(bench for bench in self.benches.values() if seat in bench.seats)

    def alone(self, seats: Sequence[Seat], because: str) -> None:
        """Move seats to benches of their own, where the turns that they wait for are taken."""
        for seat in seats:
            self._remove(seat)
            seat.refused, seat.signature = because, ""
        for seat in seats:
            self.sit(seat, 1)
        self._tidy()

    def leave(self, seat: Seat) -> None:
        """Remove a trial that has ended or failed; the others may go on."""
        if seat in self.seats:
            self.seats.remove(seat)
        self._remove(seat)
        self._tidy()

    def _remove(self, seat: Seat) -> None:
        for bench in self.benches.values():
            if seat in bench.seats:
                bench.seats.remove(seat)

    def _tidy(self) -> None:
        """Drop empty benches, and begin turns that have waited only for who has left."""
        for key, bench in list(self.benches.items()):
            if not bench.seats:
                bench.end()
                del self.benches[key]
        for bench in self.benches.values():
            bench.look()
