"""The engine loop: it keeps the ready units of all trials and hands them to workers as slots fall free.

Each worker has a running slot and a next slot, so that it never waits for the coordinator between two units. A worker
that ends is replaced. Its unit fails with WorkerLost where it is awaited, and whoever awaits it decides what then; a
unit that it had not started goes to another worker. A unit that shows no sign of life until its deadline is hung: its
worker writes its stacks and is killed, and a result that comes all the same is refused.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path

from hydra_tune.devices import Device
from hydra_tune.engine import messages
from hydra_tune.engine.gangs import Gang, Seat, Seats, store_path
from hydra_tune.engine.jobs import CallReply, Job, Load, Observer, WorkerState
from hydra_tune.engine.process import WorkerProcess
from hydra_tune.engine.reaper import Reaper
from hydra_tune.engine.scheduler import POLICIES, Policy, Ready, ReadyUnits
from hydra_tune.engine.unit import Failure, Memory, Role, Unit, UnitFailed, UnitHung, UnitResult
from hydra_tune.errors import HydraTuneError, WorkerLost

logger = logging.getLogger(__name__)

SLOTS = 2
"""One unit that runs and one that waits at the worker."""
AHEAD = 8
"""Units at a worker at most, where they all wait there: what is sent to one that hangs must fit into its socket."""
GANG_GRACE = 10.0
"""Seconds in which the members of a gang end by themselves when one of them failed; then they are killed."""
STILLBORN_LIMIT = 3
"""Workers of one device that end before they are ready, one after another, before the engine gives up."""


class Engine:
    """Runs units on a pool of devices; use as `async with Engine(...) as engine`."""

    def __init__(
        self,
        devices: Sequence[Device],
        observer: Observer,
        *,
        directory: str,
        python_path: Sequence[str] = (),
        expect: int | None = None,
        overflow: Sequence[str] = (),
        policy: Policy = POLICIES["fair"],
        slots: int = SLOTS,
        slots_alone: int | None = None,
        warm: Mapping[Role, Sequence[str]] | None = None,
    ) -> None:
        """`expect` is how many units are likely to be ready at once: so many workers start now, others when needed.

        With `slots=1` a worker gets its next unit only when it is idle: a policy that would rather stay with a trial
        can then wait for that trial's next unit, and of several trials in stages none is kept waiting by a unit of
        another that was handed out too early. `slots_alone` holds while only one trial has units. Workers of
        each role import the modules in `warm` before their first unit comes.
        """
        self.devices = tuple(devices)
        self.observer = observer
        self.directory = directory
        self.python_path = (*python_path, *sys.path)
        self._expect = len(self.devices) if expect is None else min(expect, len(self.devices))
        self._workers: dict[int, WorkerState] = {}
        self._waiting: dict[Hashable, Job] = {}
        self._ready = ReadyUnits(policy)
        self._seats = Seats()
        self._slots = slots
        self._slots_alone = slots if slots_alone is None else slots_alone
        self._warm = warm or {}
        self.overflow = tuple(overflow)
        self._home: dict[str, int] = {}
        """The worker that ran an attempt's last unit."""
        self._ids = itertools.count()
        self._turn = itertools.count()
        self._last_turn: dict[str, int] = {}
        self._stillborn: dict[str, int] = {}
        self._broken: HydraTuneError | None = None
        self._watchers: set[asyncio.Task[None]] = set()
        self._closing = False
        self._freed = asyncio.Event()
        """Set when an attempt gives up what it held of a device."""

    async def __aenter__(self) -> Engine:
        self._reaper = Reaper()
        for device in self.devices[: self._expect]:
            self._start_worker(Role.DEVICE, device)
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._closing = True
        for worker in self._workers.values():
            worker.process.kill()
        try:
            await asyncio.gather(*self._watchers)
        finally:
            self._reaper.close()

    @property
    def in_stages(self) -> bool:
        """Whether its policy is for trials whose every unit has its worker."""
        return self._ready.policy.in_stages

    async def run(self, unit: Unit) -> UnitResult:
        """Run `unit` on the first worker that may take it. Raises UnitFailed or WorkerLost."""
        job = self._job(unit)
        self._enqueue(job)
        self._dispatch()
        try:
            return await job.future
        finally:
            self._forget(job)

    async def run_gang(self, units: Sequence[Unit]) -> list[UnitResult]:
        """Run `units` at the same time, each on a device of its own, as the ranks of one torch.distributed group.

        When one fails, all do; what is raised is the failure that the others follow from.
        """
        assert 0 < len(units) <= len(self.devices), "a gang has a device for each member"
        jobs = [self._job(unit) for unit in units]
        gang = Gang({job.id: job.unit.worker for job in jobs}, store_path(self.directory, jobs[0].id))
        self._seats.add(gang)
        for job in jobs:
            job.gang = gang
            self._enqueue(job)
        self._dispatch()
        try:
            await asyncio.wait([job.future for job in jobs], return_when=asyncio.FIRST_EXCEPTION)
            await self._end_gang(gang, jobs)
            return [job.future.result() for job in jobs]
        finally:
            for job in jobs:
                self._forget(job)
            self._hand_out_seats(self._seats.leave(gang))
            Path(gang.store).unlink(missing_ok=True)

    async def _end_gang(self, gang: Gang, jobs: Sequence[Job]) -> None:
        """Where a member failed: let the others end, and raise the failure that theirs follow from."""
        failed = [job for job in jobs if job.future.done() and job.future.exception() is not None]
        if failed and gang.started:
            # They have lost their connection to it; one that waits for it all the same is ended.
            others = [job.future for job in jobs if not job.future.done()]
            if others:
                await asyncio.wait(others, timeout=GANG_GRACE)
            # Not those that are about to be killed: their end follows from the failure.
            failed = [job for job in jobs if job.future.done() and job.future.exception() is not None]
            for worker in list(self._workers.values()):
                if any(job.id in worker.jobs and not job.future.done() for job in jobs):
                    worker.process.kill("it waited for a member of its gang that had failed")
            await asyncio.gather(*others, return_exceptions=True)
        if failed:
            error = min(failed, key=_blame).future.exception()
            assert error is not None
            raise error

    def _job(self, unit: Unit) -> Job:
        if self._broken is not None:
            raise self._broken
        if unit.worker is not None and unit.worker not in self._workers:
            raise WorkerLost(f"the worker that held trial {unit.trial} is gone")
        if unit.role is Role.BUILDER:
            self._ensure_builder()
        return Job(next(self._ids), unit, asyncio.get_running_loop().create_future(), next(self._turn))

    def workers_of_all_devices(self) -> tuple[int, ...]:
        """A worker of each device, in their order; those that are not there yet are started."""
        found = {worker.device: worker.id for worker in self._workers.values() if worker.role is Role.DEVICE}
        for device in self.devices:
            if device not in found:
                self._start_worker(Role.DEVICE, device)
        found = {worker.device: worker.id for worker in self._workers.values() if worker.role is Role.DEVICE}
        return tuple(found[device] for device in self.devices)

    async def reserve(self, attempt: str, memory: Memory) -> None:
        """Wait until every device has room for an attempt, and keep it for it: parts of it go to all of them."""
        self.workers_of_all_devices()
        while min(self.room(attempt)) < memory.needs:
            self._freed.clear()
            await self._freed.wait()
        for worker in self._workers.values():
            if worker.role is Role.DEVICE:
                worker.held[attempt] = memory
                worker.resident.add(attempt)  # so that it is dropped there too

    def let_go(self, attempt: str) -> None:
        """An attempt needs its place on no device for the time being; what it has there can be spilled."""
        for worker in self._workers.values():
            worker.held.pop(attempt, None)
        self._freed.set()
        if self._waiting:
            # After whoever let go: its next unit is then among those to choose from.
            asyncio.get_running_loop().call_soon(self._dispatch)

    @property
    def builder(self) -> int | None:
        """The builder's worker, where there is one."""
        return next((worker.id for worker in self._workers.values() if worker.role is Role.BUILDER), None)

    def room(self, attempt: str) -> tuple[int, ...]:
        """What others leave of each device, in their order, as far as it is known what they hold."""
        beside = {w.device: w.free_beside(attempt) for w in self._workers.values() if w.role is Role.DEVICE}
        return tuple(beside.get(device, device.memory) for device in self.devices)

    def load(self, attempt: str) -> Load:
        """How busy the devices are, as an attempt sees it that could do with more or fewer of them."""
        workers = [worker for worker in self._workers.values() if worker.role is Role.DEVICE]
        idle = len(self.devices) - sum(bool(worker.jobs) for worker in workers)
        given = [job for worker in workers for job in worker.jobs.values() if not job.started]
        others = [job for job in (*self._waiting.values(), *given) if job.unit.attempt != attempt]
        held = [job for worker in workers for job in worker.jobs.values()]
        attempts = {job.unit.attempt for job in (*self._waiting.values(), *held)} - {attempt}
        return Load(idle, sum(job.unit.role is Role.DEVICE for job in others), len(attempts))

    def is_busy(self, worker: int) -> bool:
        """Whether a worker runs a unit, or one waits that it may run."""
        state = self._workers.get(worker)
        if state is None:
            return False
        waiting = (job.unit for job in self._waiting.values() if job.unit.role is state.role)
        return bool(state.jobs) or any(unit.worker in (None, worker) for unit in waiting)

    def drop(self, attempt: str, role: Role | None = None) -> None:
        """Free what workers hold for an attempt, at once; with a `role`, only those of that kind."""
        if role is None:
            self._last_turn.pop(attempt, None)
            self._home.pop(attempt, None)
        for worker in self._workers.values():
            if attempt in worker.resident and role in (None, worker.role):
                worker.resident.discard(attempt)
                worker.held.pop(attempt, None)
                worker.process.send(messages.Drop(attempt))
        self._freed.set()
        if self._waiting and not self._closing:
            self._dispatch()  # somebody may have waited for the room

    def _forget(self, job: Job) -> None:
        """After a job ended or its caller gave up: take it out of the queue, or out of its worker's next slot."""
        self._dequeue(job)
        for worker in self._workers.values():
            if job.id in worker.jobs:
                if job.gang is not None and not job.gang.started:
                    del worker.jobs[job.id]  # the worker has not heard of it
                else:
                    worker.process.send(messages.Withdraw(job.id))

    # Workers

    def _start_worker(self, role: Role, device: Device) -> None:
        id = next(self._ids)
        setup = messages.Setup(
            worker=id, device=device.name, torch_device=device.torch_device, memory=device.memory,
            threads=device.threads, directory=self.directory, overflow=self.overflow, sys_path=self.python_path,
            cwd=os.getcwd(), warm=tuple(self._warm.get(role, ())),
        )  # fmt: skip
        process = WorkerProcess(
            setup,
            on_message=lambda message: self._on_message(worker, message),
            on_line=lambda line: self.observer.worker_line(device.name, line),
            reaper=self._reaper,
        )
        worker = WorkerState(id, role, device, process)
        self._workers[id] = worker
        process.start()
        watcher = asyncio.create_task(self._watch(worker), name=f"watch {device.name}")
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    def _start_needed_workers(self) -> None:
        free = [job for job in self._waiting.values() if job.unit.role is Role.DEVICE and job.unit.worker is None]
        devices = [worker for worker in self._workers.values() if worker.role is Role.DEVICE]
        started = {worker.device for worker in devices}
        lacking = len(free) - sum(not worker.jobs for worker in devices)
        for device in [device for device in self.devices if device not in started][: max(0, lacking)]:
            self._start_worker(Role.DEVICE, device)

    def _ensure_builder(self) -> None:
        if not any(worker.role is Role.BUILDER for worker in self._workers.values()):
            self._start_worker(Role.BUILDER, Device("builder", "cpu", memory=0, threads=self.devices[0].threads))

    async def _watch(self, worker: WorkerState) -> None:
        """Wait for a worker's end; then fail what it had and start another in its place."""
        await worker.process.closed()
        del self._workers[worker.id]
        self._freed.set()
        how = worker.process.reap()
        if self._closing:
            return
        reason = f"worker {worker.device.name} (pid {worker.process.pid}) {how}"
        logger.info("%s", reason)
        self.observer.worker_lost(worker.device.name, reason)
        self._replace(worker, reason)
        for job in worker.jobs.values():
            job.quiet()
            if job.gang is not None and not job.gang.started:
                del job.gang.taken[job.id]  # somebody else may take the seat
            begun = job.started or (job.gang is not None and job.gang.started)
            if not begun and not job.future.done():
                self._enqueue(job)
        for job in [*worker.jobs.values(), *self._waiting.values()]:
            bound = job.unit.worker == worker.id or job.id not in self._waiting
            if self._broken is not None or bound:
                self._fail(job, self._broken or WorkerLost(reason))
        self._dispatch()

    def _replace(self, worker: WorkerState, reason: str) -> None:
        name = worker.device.name
        self._stillborn[name] = 0 if worker.ready else self._stillborn.get(name, 0) + 1
        if self._stillborn[name] < STILLBORN_LIMIT:
            self._start_worker(worker.role, worker.device)
            return
        tail = " | ".join(list(worker.process.tail)[-3:])
        self._broken = HydraTuneError(f"{reason} before it was ready, {STILLBORN_LIMIT} times; it last said: {tail}")

    def _fail(self, job: Job, error: Exception) -> None:
        self._dequeue(job)
        if not job.future.done():
            job.future.set_exception(error)

    def _set_alarm(self, worker: WorkerState, job: Job) -> None:
        job.quiet()
        if job.unit.deadline is not None:
            loop = asyncio.get_running_loop()
            job.alarm = loop.call_later(job.unit.deadline, self._on_alarm, worker, job)

    def _on_alarm(self, worker: WorkerState, job: Job) -> None:
        job.hung = True
        ending = asyncio.create_task(self._end_hung(worker, job), name=f"end {worker.device.name}")
        self._watchers.add(ending)
        ending.add_done_callback(self._watchers.discard)

    async def _end_hung(self, worker: WorkerState, job: Job) -> None:
        unit = job.unit
        logger.info("trial %d: its %s on %s shows no sign of life", unit.trial, unit.kind, worker.device.name)
        stacks = await worker.process.dump_stacks()
        message = f"{unit.kind} on {worker.device.name} showed no sign of life for {unit.deadline:g} s"
        self._fail(job, UnitHung(message, stacks))
        if job.gang is None or job.id in worker.jobs:  # a member that only waited for the hung one has ended by now
            worker.process.kill("it showed no sign of life")

    # Units

    def _dispatch(self) -> None:
        """Fill running slots first, then next slots, so that no worker idles while another one queues."""
        self._start_needed_workers()
        self._start_gang()
        for depth in range(self._depth()):
            for worker in list(self._workers.values()):
                # The builder serves the oldest trial first: what it was given too early, that one would wait for.
                if len(worker.jobs) == depth and (depth == 0 or worker.role is Role.DEVICE):
                    self._hand_out(worker)
        if self.in_stages:
            for worker in list(self._workers.values()):
                self._hand_out_ahead(worker)

    def _hand_out_ahead(self, worker: WorkerState) -> None:
        """Let what must run there anyway wait there, in order: the worker goes on without a word from here."""
        while len(worker.jobs) < AHEAD:
            first = self._ready.peek(worker.view())
            if first is None or first.worker != worker.id or not self._hand_out(worker):
                return

    def _depth(self) -> int:
        """How many units a worker may have at a time."""
        if self._slots == self._slots_alone:
            return self._slots
        given = (job for worker in self._workers.values() for job in worker.jobs.values())
        attempts = {job.unit.attempt for job in (*self._waiting.values(), *given) if job.unit.role is Role.DEVICE}
        return self._slots if len(attempts) > 1 else self._slots_alone

    def _enqueue(self, job: Job) -> None:
        """The job waits for a worker; a member of a gang, while another gang is being seated, for that first."""
        self._waiting[job.id] = job
        if job.gang is None or self._seats.gathering in (None, job.gang):
            self._ready.add(self._as_ready(job))

    def _dequeue(self, job: Job) -> None:
        self._waiting.pop(job.id, None)
        self._ready.discard(job.id)

    def _as_ready(self, job: Job) -> Ready:
        unit = job.unit
        home = self._home.get(unit.attempt) if unit.role is Role.DEVICE else None
        return Ready(
            key=job.id, trial=unit.trial, attempt=unit.attempt, role=unit.role, worker=unit.worker,
            home=home, remaining=unit.remaining, arrival=job.arrival,
            last_turn=self._last_turn.get(unit.attempt, -1), memory=unit.memory, rank=unit.rank,
        )  # fmt: skip

    def _hand_out(self, worker: WorkerState) -> bool:
        """Give a worker its next unit; False where there is none."""
        job = self._next_for(worker)
        if job is None:
            return False
        unit = job.unit
        worker.jobs[job.id] = job
        worker.resident.add(unit.attempt)
        worker.current = unit.attempt
        if worker.role is Role.DEVICE:
            self._home[unit.attempt] = worker.id
        self._last_turn[unit.attempt] = next(self._turn)
        for other in self._ready.of_attempt(unit.attempt):  # the trial has had its turn
            self._ready.add(self._as_ready(self._waiting[other.key]))
        if unit.memory is not None:
            worker.held[unit.attempt] = unit.memory
        if job.gang is None:
            worker.process.send(self._run_message(worker, job))
        else:
            self._take_seat(worker, job.id, job.gang)
        return True

    def _run_message(self, worker: WorkerState, job: Job, seat: Seat | None = None) -> messages.Run:
        unit, blocks = job.unit, None
        if worker.role is Role.DEVICE:
            blocks = worker.room_beside(unit.attempt)
            if unit.memory is not None and not unit.memory.spills:
                blocks -= unit.memory.needs
        order = self._ready.order(self._as_ready(job)) if self.in_stages else ()
        return messages.Run(job.id, unit.attempt, unit.work, unit.args, seat, blocks, order)

    def _next_for(self, worker: WorkerState) -> Job | None:
        if any(job.gang is not None and not job.gang.started for job in worker.jobs.values()):
            return None  # it has a seat, and waits for the others
        gang = self._seats.gathering
        key = gang.open_seat(worker.id) if gang is not None and worker.role is Role.DEVICE else None
        if key is None:
            ready = self._ready.take(worker.view())
            if ready is None:
                return None
            job = self._waiting[ready.key]
            # A gang's first seat: where this worker has one of its own, others are for other workers.
            key = job.id if job.gang is None else job.gang.open_seat(worker.id)
            assert key is not None
            if key != job.id:
                self._ready.add(ready)
        self._ready.discard(key)
        return self._waiting.pop(key)

    # Gangs

    def _take_seat(self, worker: WorkerState, job: int, gang: Gang) -> None:
        if self._seats.gathering is None:
            for key in self._seats.begin(gang):
                self._ready.discard(key)
        gang.taken[job] = worker.id
        self._start_gang()

    def _start_gang(self) -> None:
        """Start the gang that is being seated, when all its members are there and have nothing else to do."""
        gang = self._seats.gathering
        if gang is None or not gang.full:
            return
        seated = {key: self._workers[id] for key, id in gang.taken.items() if id in self._workers}
        if len(seated) < len(gang.seats) or any(len(worker.jobs) > 1 for worker in seated.values()):
            return
        gang.started = True
        for key, worker in seated.items():
            worker.process.send(self._run_message(worker, worker.jobs[key], gang.seat_of(key)))
        self._hand_out_seats(self._seats.leave(gang))

    def _hand_out_seats(self, jobs: Iterable[int]) -> None:
        """A gang is out of the way: others may be seated."""
        for key in jobs:
            if key in self._waiting:
                self._ready.add(self._as_ready(self._waiting[key]))
        asyncio.get_running_loop().call_soon(self._dispatch)

    def _on_message(self, worker: WorkerState, message: object) -> None:
        match message:
            case messages.Ready():
                worker.ready = True
            case messages.Started(unit=id) if id in worker.jobs:
                worker.jobs[id].started = True
                self._set_alarm(worker, worker.jobs[id])
                self.observer.unit_started(worker.jobs[id].unit, worker.device.name)
            case messages.Alive(unit=id) if id in worker.jobs and not worker.jobs[id].hung:
                self._set_alarm(worker, worker.jobs[id])
            case messages.Call():
                self._on_call(worker, message)
            case messages.Done() if message.unit in worker.jobs:
                self._on_done(worker, message)
            case messages.Withdrawn(unit=id):
                worker.jobs.pop(id, None)
                self._dispatch()

    def _on_call(self, worker: WorkerState, call: messages.Call) -> None:
        job = worker.jobs.get(call.unit)
        reply = None if call.call is None else CallReply(worker.process, call.call)
        if job is None or job.hung:
            # A thread that user code left behind: its trial has ended, or was given up.
            if reply is not None:
                reply(None, Failure("ValueError", "the trial has ended", ""))
            return
        self._set_alarm(worker, job)
        self.observer.call(job.unit, call.name, call.args, reply)

    def _on_done(self, worker: WorkerState, done: messages.Done) -> None:
        job = worker.jobs.pop(done.unit)
        job.ended = done.started + done.seconds
        job.quiet()
        if job.hung:
            self.observer.late_result(job.unit, worker.device.name)
            return
        result = UnitResult(
            done.value, worker.id, worker.device.name, done.started, done.seconds, done.peak_bytes, done.steps
        )
        if not job.future.done():
            if done.failure is None:
                job.future.set_result(result)
            else:
                job.future.set_exception(UnitFailed(done.failure))
        self.observer.unit_ended(job.unit, result)
        if self._depth() == 1:
            # After whoever awaited the unit: the trial's next one is then among those to choose from.
            asyncio.get_running_loop().call_soon(self._dispatch)
        else:
            self._dispatch()


def _blame(job: Job) -> tuple[bool, float]:
    """Of the failures of a gang's members the least is the one to blame: a dead or hung member, then the first."""
    return isinstance(job.future.exception(), UnitFailed), job.ended
