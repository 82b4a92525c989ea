"""Gangs: units that run at the same time on several devices, as one torch.distributed group.

A gang has a seat for each of its units. A worker that takes a seat waits until all seats are taken; then all units
start. Two gangs that each hold a seat the other lacks would deadlock, so only one gang gathers at a time: its first
seat competes with the units of other trials in the scheduler's order, and once a worker has taken that seat, the other
seats go before all other units, so that a seated worker waits only for running units. `Seats` keeps that order, without
processes or clocks; `join_group` is the worker's side.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

WAIT_SECONDS = 600.0
"""Seconds that a member waits in a collective. Dead members are noticed at once, hung ones at their deadline."""


@dataclass(frozen=True)
class Seat:
    """A member's place in its gang, as sent to the worker."""

    rank: int
    size: int
    store: str
    """Rendezvous file of the group, used for this gang only."""


@dataclass
class Gang:
    """A gang that gathers or runs, with its open and taken seats."""

    seats: dict[int, int | None]
    """By job: the only worker that may take the seat; None if any may."""
    store: str = ""
    taken: dict[int, int] = field(default_factory=dict)
    """By job: the worker that has taken the seat."""
    started: bool = False

    @property
    def full(self) -> bool:
        return len(self.taken) == len(self.seats)

    def seat_of(self, job: int) -> Seat:
        return Seat(list(self.seats).index(job), len(self.seats), self.store)

    def open_seat(self, worker: int) -> int | None:
        """Return the job whose seat `worker` may take: a seat bound to it first, else an unbound one."""
        if worker in self.taken.values():
            return None
        open_seats = [job for job in self.seats if job not in self.taken]
        own = [job for job in open_seats if self.seats[job] == worker]
        return next(iter(own or [job for job in open_seats if self.seats[job] is None]), None)


class Seats:
    """Keeps track of the gathering gang and of the gangs that wait for their turn."""

    def __init__(self) -> None:
        self.gathering: Gang | None = None
        self._waiting: list[Gang] = []

    def add(self, gang: Gang) -> None:
        self._waiting.append(gang)

    def begin(self, gang: Gang) -> Iterable[int]:
        """Mark the gang as gathering; return the jobs of other gangs, which must wait."""
        assert self.gathering is None
        self.gathering = gang
        self._waiting.remove(gang)
        return [job for other in self._waiting for job in other.seats]

    def leave(self, gang: Gang) -> Iterable[int]:
        """Remove a gang that started or ended; return the jobs that may be handed out again."""
        if gang in self._waiting:
            self._waiting.remove(gang)
        if self.gathering is not gang:
            return []
        self.gathering = None
        return [job for other in self._waiting for job in other.seats]


def join_group(seat: Seat, device: torch.device) -> None:
    """Join the gang's process group, torch's default group for the length of a unit.

    The backend is the one for the device: see `collectives.py`.
    """
    import torch.distributed as dist

    from hydra_tune.engine.collectives import group_backend

    # Members find each other by their process's count of groups. A group that failed while forming is counted too, and
    # leaving a group resets the count, so counts of two workers may differ without this.
    dist.distributed_c10d._world.group_count = 0
    dist.init_process_group(
        group_backend(device.type),
        store=dist.FileStore(seat.store, seat.size),  # type: ignore[attr-defined]
        rank=seat.rank,
        world_size=seat.size,
        timeout=datetime.timedelta(seconds=WAIT_SECONDS),
    )


def leave_group() -> None:
    """Leave the group; members that still wait for this one in a collective get an error."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def store_path(directory: str, gang: int) -> str:
    """Return a fresh rendezvous file for a gang: a used file would hold old addresses."""
    return str(Path(directory) / f"gang-{gang}")
