"""Gangs: units that run at the same time on as many devices, as one torch.distributed group.

A gang has a seat for each of its units. A worker that takes a seat waits there until all are taken; then all start. Two
gangs that each held a seat which the other lacks would wait for ever, so seats are given to one gang at a time: the
first of its seats competes with the units of other trials by the scheduler's order, and once a worker has taken it, the
others go before everything else, so that nobody waits longer than the units that run. `Seats` keeps that order, without
processes or clocks; `Group` is the worker's side of it.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

WAIT_SECONDS = 600.0
"""How long a member waits for the others in a collective. The dead are noticed at once, the hung at their deadline."""


@dataclass(frozen=True)
class Seat:
    """A member's place in its gang, as the worker hears of it."""

    rank: int
    size: int
    store: str
    """The file through which the members find each other, of this unit alone."""


@dataclass
class Gang:
    """A gang on its way: which of its seats are open, and who has the others."""

    seats: dict[int, int | None]
    """By job: the only worker that may take the seat, where it is bound to one."""
    store: str = ""
    taken: dict[int, int] = field(default_factory=dict)
    """By job: the worker that has it."""
    started: bool = False

    @property
    def full(self) -> bool:
        return len(self.taken) == len(self.seats)

    def seat_of(self, job: int) -> Seat:
        return Seat(list(self.seats).index(job), len(self.seats), self.store)

    def open_seat(self, worker: int) -> int | None:
        """The seat that `worker` may take: its own where it has one, else any that is bound to nobody."""
        if worker in self.taken.values():
            return None
        open_seats = [job for job in self.seats if job not in self.taken]
        own = [job for job in open_seats if self.seats[job] == worker]
        return next(iter(own or [job for job in open_seats if self.seats[job] is None]), None)


class Seats:
    """Which gang is being seated; the seats of the others wait."""

    def __init__(self) -> None:
        self.gathering: Gang | None = None
        self._waiting: list[Gang] = []

    def add(self, gang: Gang) -> None:
        self._waiting.append(gang)

    def begin(self, gang: Gang) -> Iterable[int]:
        """A worker took the gang's first seat. The jobs of other gangs, which are not to be handed out for now."""
        assert self.gathering is None
        self.gathering = gang
        self._waiting.remove(gang)
        return [job for other in self._waiting for job in other.seats]

    def leave(self, gang: Gang) -> Iterable[int]:
        """The gang has started or gone. The jobs that may be handed out again."""
        if gang in self._waiting:
            self._waiting.remove(gang)
        if self.gathering is not gang:
            return []
        self.gathering = None
        return [job for other in self._waiting for job in other.seats]


class Group:
    """A member's torch.distributed group for the length of one unit: gloo on CPUs, NCCL on GPUs."""

    def __init__(self, seat: Seat | None, device: torch.device) -> None:
        self.seat = seat
        self.device = device

    def join(self) -> None:
        """Find the others; collectives of the default group are then this gang's."""
        if self.seat is None:
            return
        import torch.distributed as dist

        dist.init_process_group(
            dist.get_default_backend_for_device(self.device),
            store=dist.FileStore(self.seat.store, self.seat.size),  # type: ignore[attr-defined]
            rank=self.seat.rank,
            world_size=self.seat.size,
            timeout=datetime.timedelta(seconds=WAIT_SECONDS),
        )

    def leave(self) -> None:
        """End the group; whoever still waits for this member in a collective hears of it by an error."""
        if self.seat is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def store_path(directory: str, gang: int) -> str:
    """A fresh file for a gang to meet at: one that was used before would bring old addresses."""
    return str(Path(directory) / f"gang-{gang}")
