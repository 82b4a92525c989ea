"""Hands out units: keeps the jobs that wait for a worker and chooses a worker for each.

A worker with a free slot gets the first unit that it may run in the policy's order (`scheduler.ReadyUnits`). While a
gang gathers, its open seats go first (`gangs.Seats`). The engine sends units to workers; this module only decides.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from hydra_tune.engine.gangs import Gang, Seat, Seats
from hydra_tune.engine.jobs import Job, Load, WorkerState
from hydra_tune.engine.pool import WorkerPool
from hydra_tune.engine.scheduler import Policy, Ready, ReadyUnits, WorkerView
from hydra_tune.engine.unit import Memory, Role, Unit

AHEAD = 8
"""Most units queued at a worker in advance: their messages must fit into the socket of a worker that hangs."""

Send: TypeAlias = Callable[[WorkerState, Job, Seat | None], None]


class Dispatch:
    """The waiting jobs of an engine, and the order in which workers get them."""

    def __init__(
        self, pool: WorkerPool, policy: Policy, *, slots: int, slots_alone: int | None, builders: int, send: Send
    ) -> None:
        """`send` sends a unit to the worker that was chosen for it, for a member of a gang with its seat.

        `slots_alone` replaces `slots` while only one trial has units. A further builder starts, up to `builders`, when
        a unit for any of them waits and all are busy.
        """
        self._pool = pool
        self._ready = ReadyUnits(policy)
        self._seats = Seats()
        self._slots = slots
        self._slots_alone = slots if slots_alone is None else slots_alone
        self._builders = builders
        self._send = send
        self._waiting: dict[Hashable, Job] = {}
        self._ids = itertools.count()
        self._turn = itertools.count()
        """Numbers arrivals and hand-outs in one sequence."""
        self._counts_by_device = False
        """True once a unit's memory counted against that of all workers on a device."""
        self._last_turn: dict[str, int] = {}
        self._home: dict[str, int] = {}
        """Worker that ran each attempt's last unit."""

    @property
    def in_stages(self) -> bool:
        """True if the scheduling policy is for trials whose every unit is bound to a worker."""
        return self._ready.policy.in_stages

    @property
    def waiting(self) -> Mapping[Hashable, Job]:
        """Jobs that no worker has, by id."""
        return self._waiting

    def new_job(self, unit: Unit) -> Job:
        """Return a job for `unit`; it waits for a worker once it is added."""
        return Job(next(self._ids), unit, asyncio.get_running_loop().create_future(), next(self._turn))

    def add(self, job: Job) -> None:
        """Queue a job for a worker; members of a gang wait until no other gang is gathering."""
        self._waiting[job.id] = job
        if job.unit.memory is not None and job.unit.memory.of_device:
            self._counts_by_device = True
        if job.gang is None or self._seats.gathering in (None, job.gang):
            self._ready.add(self._as_ready(job))

    def add_gang(self, gang: Gang, jobs: Sequence[Job]) -> None:
        """Queue the members of a gang."""
        self._seats.add(gang)
        for job in jobs:
            job.gang = gang
            self.add(job)

    def remeasure(self, memory: Memory) -> None:
        """Give the waiting units whose memory counts by device this memory instead."""
        for job in list(self._waiting.values()):
            if job.unit.memory is not None and job.unit.memory.of_device:
                job.unit = replace(job.unit, memory=memory)
                self.add(job)

    def discard(self, job: Job) -> None:
        """Remove a job, if it waits."""
        self._waiting.pop(job.id, None)
        self._ready.discard(job.id)

    def leave(self, gang: Gang) -> None:
        """Remove a gang that started or ended; the seats of other gangs can be handed out again."""
        for key in self._seats.leave(gang):
            if key in self._waiting:
                self._ready.add(self._as_ready(self._waiting[key]))
        self.soon()

    def forget(self, attempt: str) -> None:
        """Forget the last turn and the worker of an attempt that ended."""
        self._last_turn.pop(attempt, None)
        self._home.pop(attempt, None)

    def order(self, job: Job) -> tuple[float, ...]:
        """Return the job's sort key among units that wait at one worker; empty unless trials are in stages."""
        return self._ready.order(self._as_ready(job)) if self.in_stages else ()

    def load(self, attempt: str) -> Load:
        """Return the load of the devices, apart from the given attempt."""
        workers = self._pool.of_role(Role.DEVICE)
        idle = len(self._pool.devices) - sum(bool(worker.jobs) for worker in workers)
        held = [job for worker in workers for job in worker.jobs.values()]
        waiting = [*self._waiting.values(), *(job for job in held if not job.started)]
        others = [job for job in waiting if job.unit.attempt != attempt]
        attempts = {job.unit.attempt for job in (*self._waiting.values(), *held)} - {attempt}
        return Load(idle, sum(job.unit.role is Role.DEVICE for job in others), len(attempts))

    def depth(self) -> int:
        """Return the number of units that a worker may have at a time."""
        if self._slots == self._slots_alone:
            return self._slots
        given = (job for worker in self._pool.workers.values() for job in worker.jobs.values())
        attempts = {job.unit.attempt for job in (*self._waiting.values(), *given) if job.unit.role is Role.DEVICE}
        return self._slots if len(attempts) > 1 else self._slots_alone

    # Handing out

    def soon(self) -> None:
        """Hand out after the caller has continued, so that its next unit can be chosen too."""
        asyncio.get_running_loop().call_soon(self.now)

    def now(self) -> None:
        """Fill running slots first, then next slots, so that no worker idles while another has a queue."""
        self._start_needed_workers()
        self._start_gang()
        for depth in range(self.depth()):
            for worker in list(self._pool.workers.values()):
                # The builder serves the oldest trial first, so units are not handed to it in advance.
                if len(worker.jobs) == depth and (depth == 0 or worker.role is Role.DEVICE):
                    self._hand_out(worker)
        if self.in_stages:
            for worker in list(self._pool.workers.values()):
                self._hand_out_ahead(worker)

    def _start_needed_workers(self) -> None:
        free = [job for job in self._waiting.values() if job.unit.role is Role.DEVICE and job.unit.worker is None]
        self._pool.start_devices(len(free) - sum(not worker.jobs for worker in self._pool.of_role(Role.DEVICE)))
        builders = self._pool.of_role(Role.BUILDER)
        unbound = any(job.unit.role is Role.BUILDER and job.unit.worker is None for job in self._waiting.values())
        if unbound and len(builders) < self._builders and all(worker.jobs for worker in builders):
            self._pool.start_builder()

    def _hand_out_ahead(self, worker: WorkerState) -> None:
        """Queue units bound to this worker there in advance, in order, so that it runs them without the coordinator."""
        while len(worker.jobs) < AHEAD:
            first = self._ready.peek(self._view(worker))
            if first is None or first.worker != worker.id or not self._hand_out(worker):
                return

    def _hand_out(self, worker: WorkerState) -> bool:
        """Give a worker its next unit; False if there is none."""
        job = self._next_for(worker)
        if job is None:
            return False
        attempt = job.unit.attempt
        worker.take(job)
        if worker.role is Role.DEVICE:
            self._home[attempt] = worker.id
        self._last_turn[attempt] = next(self._turn)
        for other in self._ready.of_attempt(attempt):  # the trial's other units move back in the order
            self._ready.add(self._as_ready(self._waiting[other.key]))
        if job.gang is None:
            self._send(worker, job, None)
        else:
            self._take_seat(worker, job.id, job.gang)
        return True

    def _next_for(self, worker: WorkerState) -> Job | None:
        """Remove and return the job that a worker runs next."""
        if any(job.gang is not None and not job.gang.started for job in worker.jobs.values()):
            return None  # the worker has a seat and waits for the other members
        gang = self._seats.gathering
        key = gang.open_seat(worker.id) if gang is not None and worker.role is Role.DEVICE else None
        if key is None:
            ready = self._ready.take(self._view(worker))
            if ready is None:
                return None
            job = self._waiting[ready.key]
            # The gang's first seat: a worker that has a seat bound to it takes that one and leaves the others.
            key = job.id if job.gang is None else job.gang.open_seat(worker.id)
            assert key is not None
            if key != job.id:
                self._ready.add(ready)
        self._ready.discard(key)
        return self._waiting.pop(key)

    def _view(self, worker: WorkerState) -> WorkerView:
        if not self._counts_by_device or worker.role is not Role.DEVICE:
            return worker.view()
        workers = self._pool.of_role(Role.DEVICE)
        return worker.view([each for each in workers if each.device.torch_device == worker.device.torch_device])

    def _take_seat(self, worker: WorkerState, job: int, gang: Gang) -> None:
        if self._seats.gathering is None:
            for key in self._seats.begin(gang):
                self._ready.discard(key)
        gang.taken[job] = worker.id
        self._start_gang()

    def _start_gang(self) -> None:
        """Start the gathering gang once all members are seated and their workers have no other unit."""
        gang = self._seats.gathering
        if gang is None or not gang.full:
            return
        seated = {key: self._pool.workers[id] for key, id in gang.taken.items() if id in self._pool.workers}
        if len(seated) < len(gang.seats) or any(len(worker.jobs) > 1 for worker in seated.values()):
            return
        gang.started = True
        for key, worker in seated.items():
            self._send(worker, worker.jobs[key], gang.seat_of(key))
        self.leave(gang)

    def _as_ready(self, job: Job) -> Ready:
        unit = job.unit
        home = self._home.get(unit.attempt) if unit.role is Role.DEVICE else None
        return Ready(
            key=job.id, trial=unit.trial, attempt=unit.attempt, role=unit.role, worker=unit.worker,
            home=home, remaining=unit.remaining, arrival=job.arrival,
            last_turn=self._last_turn.get(unit.attempt, -1), memory=unit.memory, rank=unit.rank,
        )  # fmt: skip
