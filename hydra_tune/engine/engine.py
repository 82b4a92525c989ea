"""The engine: runs the units of all trials on workers and follows each unit to its end.

`Dispatch` chooses the worker of each unit. Each worker has a running slot and a next slot, so that it never waits for
the coordinator between two units. A worker that ends is replaced. The unit it ran fails with WorkerLost, and the caller
that awaits the unit decides how to go on; a unit that it had not started goes to another worker. A unit that shows no
sign of life before its deadline is hung: its worker dumps its stacks and is killed, and a late result is refused.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra_tune.core.devices import Device
from hydra_tune.core.errors import WorkerLost
from hydra_tune.engine import messages
from hydra_tune.engine.dispatch import Dispatch
from hydra_tune.engine.gangs import Gang, Seat, store_path
from hydra_tune.engine.jobs import CallReply, Job, Load, Observer, WorkerState
from hydra_tune.engine.pauses import Pauses
from hydra_tune.engine.pool import WorkerPool
from hydra_tune.engine.scheduler import POLICIES, SLOTS, Policy
from hydra_tune.engine.unit import Failure, Memory, Role, Unit, UnitFailed, UnitHung, UnitResult

logger = logging.getLogger(__name__)

GANG_GRACE = 10.0
"""Seconds that members of a gang get to end after one of them failed; then they are killed."""


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
        """Start `expect` workers, the number of units likely to be ready at once; others start when needed.

        With `slots=1` a worker gets its next unit only when it is idle. A policy that prefers to stay with a trial can
        then wait for that trial's next unit, and no trial in stages waits behind a unit of another trial that was
        handed out too early. `slots_alone` applies while only one trial has units. Workers of each role import the
        modules in `warm` before their first unit.
        """
        self.devices = tuple(devices)
        self.observer = observer
        self.directory = directory
        self._expect = len(self.devices) if expect is None else expect
        self._pool = WorkerPool(
            devices, observer, directory=directory, overflow=overflow, python_path=python_path, warm=warm or {},
            on_message=self._on_message, on_lost=self._on_lost,
        )  # fmt: skip
        self._workers = self._pool.workers
        self._dispatch = Dispatch(self._pool, policy, slots=slots, slots_alone=slots_alone, send=self._send)
        self._pauses = Pauses()
        self._freed = asyncio.Event()
        """Set when an attempt frees device memory."""

    async def __aenter__(self) -> Engine:
        self._pauses.start()
        await self._pool.open(self._expect)
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._pauses.stop()
        await self._pool.close()

    @property
    def in_stages(self) -> bool:
        """True if the scheduling policy is for trials whose every unit is bound to a worker."""
        return self._dispatch.in_stages

    async def run(self, unit: Unit) -> UnitResult:
        """Run `unit` on the first worker that may take it. Raises UnitFailed, UnitHung or WorkerLost."""
        job = self._job(unit)
        self._dispatch.add(job)
        self._dispatch.now()
        try:
            return await job.future
        finally:
            self._forget(job)

    async def run_gang(self, units: Sequence[Unit]) -> list[UnitResult]:
        """Run `units` at the same time, each on a separate device, as the ranks of one torch.distributed group.

        If one fails, all fail; the exception raised is the original failure.
        """
        assert 0 < len(units) <= len(self.devices), "a gang has a device for each member"
        jobs = [self._job(unit) for unit in units]
        gang = Gang({job.id: job.unit.worker for job in jobs}, store_path(self.directory, jobs[0].id))
        self._dispatch.add_gang(gang, jobs)
        self._dispatch.now()
        try:
            await asyncio.wait([job.future for job in jobs], return_when=asyncio.FIRST_EXCEPTION)
            await self._end_gang(gang, jobs)
            return [job.future.result() for job in jobs]
        finally:
            for job in jobs:
                self._forget(job)
            self._dispatch.leave(gang)
            Path(gang.store).unlink(missing_ok=True)

    async def _end_gang(self, gang: Gang, jobs: Sequence[Job]) -> None:
        """If a member failed, wait for or kill the others and raise the original failure."""
        failed = [job for job in jobs if job.future.done() and job.future.exception() is not None]
        if failed and gang.started:
            # The others have lost their connection to the failed member; those that still wait for it are killed.
            others = [job.future for job in jobs if not job.future.done()]
            if others:
                await asyncio.wait(others, timeout=GANG_GRACE)
            # Computed before the kills below: deaths by those kills are not the original failure.
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
        if self._pool.broken is not None:
            raise self._pool.broken
        if unit.worker is not None and unit.worker not in self._workers:
            raise WorkerLost(f"the worker that held trial {unit.trial} is gone")
        if unit.role is Role.BUILDER:
            self._pool.ensure_builder()
        return self._dispatch.new_job(unit)

    def workers_of_all_devices(self) -> tuple[int, ...]:
        """Return a worker id for each device, in device order; start missing workers."""
        return self._pool.of_all_devices()

    def restart_workers(self, because: str) -> None:
        """Kill all workers; others replace them, and the units that they ran are lost."""
        for worker in self._workers.values():
            worker.process.kill(because)

    def warm_up(self, warm: Mapping[Role, Sequence[str]]) -> None:
        """Make workers that start from now on import these modules too."""
        self._pool.warm_up(warm)

    async def reserve(self, attempt: str, memory: Memory) -> None:
        """Wait until every device has this much free, then reserve it for the attempt."""
        self.workers_of_all_devices()
        while min(self.room(attempt)) < memory.needs:
            self._freed.clear()
            await self._freed.wait()
        for worker in self._pool.of_role(Role.DEVICE):
            worker.held[attempt] = memory
            worker.resident.add(attempt)  # so that `drop` reaches this worker too

    def let_go(self, attempt: str) -> None:
        """Release an attempt's device memory for now; its state there may be spilled."""
        for worker in self._workers.values():
            worker.held.pop(attempt, None)
        self._freed.set()
        if self._dispatch.waiting:
            self._dispatch.soon()

    @property
    def builder(self) -> int | None:
        """Worker id of the builder, or None."""
        return next((worker.id for worker in self._pool.of_role(Role.BUILDER)), None)

    def room(self, attempt: str) -> tuple[int, ...]:
        """Return the bytes of each device, in device order, that other attempts are known to leave free."""
        beside = {worker.device: worker.free_beside(attempt) for worker in self._pool.of_role(Role.DEVICE)}
        return tuple(beside.get(device, device.memory) for device in self.devices)

    def load(self, attempt: str) -> Load:
        """Return the load of the devices, apart from the given attempt."""
        return self._dispatch.load(attempt)

    def is_busy(self, worker: int) -> bool:
        """True if a worker runs a unit, or if a unit waits that the worker may run."""
        state = self._workers.get(worker)
        if state is None:
            return False
        waiting = (job.unit for job in self._dispatch.waiting.values() if job.unit.role is state.role)
        return bool(state.jobs) or any(unit.worker in (None, worker) for unit in waiting)

    def drop(self, attempt: str, role: Role | None = None) -> None:
        """Free the state that workers hold for an attempt, at once; with a `role`, only in workers of that role."""
        if role is None:
            self._dispatch.forget(attempt)
        for worker in self._workers.values():
            if attempt in worker.resident and role in (None, worker.role):
                worker.resident.discard(attempt)
                worker.held.pop(attempt, None)
                worker.process.send(messages.Drop(attempt))
        self._freed.set()
        if self._dispatch.waiting and not self._pool.closing:
            self._dispatch.now()  # a unit may have waited for the memory

    def _forget(self, job: Job) -> None:
        """Remove a job that ended or was given up from the queue, or from its worker's next slot."""
        self._dispatch.discard(job)
        for worker in self._workers.values():
            if job.id in worker.jobs:
                if job.gang is not None and not job.gang.started:
                    del worker.jobs[job.id]  # the worker has not received the unit
                else:
                    worker.process.send(messages.Withdraw(job.id))

    # Workers

    def _on_lost(self, worker: WorkerState, reason: str) -> None:
        """Fail the units that a lost worker had begun, and enqueue the others again."""
        self._freed.set()
        if self._pool.closing:
            return
        for job in worker.jobs.values():
            job.quiet()
            if job.gang is not None and not job.gang.started:
                del job.gang.taken[job.id]  # another worker may take the seat
            begun = job.started or (job.gang is not None and job.gang.started)
            if not begun and not job.future.done():
                self._dispatch.add(job)
        for job in [*worker.jobs.values(), *self._dispatch.waiting.values()]:
            bound = job.unit.worker == worker.id or job.id not in self._dispatch.waiting
            if self._pool.broken is not None or bound:
                self._fail(job, self._pool.broken or WorkerLost(reason))
        self._dispatch.now()

    def _fail(self, job: Job, error: Exception) -> None:
        self._dispatch.discard(job)
        if not job.future.done():
            job.future.set_exception(error)

    def _expect_a_start(self, worker: WorkerState) -> None:
        """Set alarms for a worker that runs nothing: a stopped worker never starts its next unit."""
        runs = not worker.ready or any(job.started for job in worker.jobs.values())
        for job in worker.jobs.values():
            waits_for_others = job.gang is not None and not job.gang.started
            if runs and not job.started:
                job.quiet()
            elif not runs and not waits_for_others and job.alarm is None:
                self._set_alarm(worker, job)

    def _set_alarm(self, worker: WorkerState, job: Job) -> None:
        job.quiet()
        if job.unit.deadline is not None:
            self._ring_in(job.unit.deadline, worker, job)

    def _ring_in(self, seconds: float, worker: WorkerState, job: Job) -> None:
        loop = asyncio.get_running_loop()
        job.alarm = loop.call_later(seconds, self._on_alarm, worker, job, self._pauses.total())

    def _on_alarm(self, worker: WorkerState, job: Job, paused_before: float) -> None:
        paused = self._pauses.total() - paused_before
        if paused > 0:
            self._ring_in(paused, worker, job)  # while this process did not run, no sign of life could be seen
            return
        if not job.started:
            # Only the worker is at fault: another worker takes the unit.
            worker.process.kill(f"it had not started a unit after {job.unit.deadline:g} s")
            return
        job.hung = True
        self._pool.in_background(self._end_hung(worker, job), f"end {worker.device.name}")

    async def _end_hung(self, worker: WorkerState, job: Job) -> None:
        unit = job.unit
        logger.info("trial %d: its %s on %s shows no sign of life", unit.trial, unit.kind, worker.device.name)
        stacks = await worker.process.dump_stacks()
        message = f"{unit.kind} on {worker.device.name} showed no sign of life for {unit.deadline:g} s"
        self._fail(job, UnitHung(message, stacks))
        if job.gang is None or job.id in worker.jobs:  # a member that only waited for the hung one has ended by now
            worker.process.kill("it showed no sign of life")

    # Units

    def _send(self, worker: WorkerState, job: Job, seat: Seat | None) -> None:
        """Send a unit to the worker that has taken it."""
        unit, blocks = job.unit, None
        if worker.role is Role.DEVICE:
            blocks = worker.room_beside(unit.attempt)
            if unit.memory is not None and not unit.memory.spills:
                blocks -= unit.memory.needs
        call = pickle.dumps((unit.work, unit.args), protocol=pickle.HIGHEST_PROTOCOL)
        worker.process.send(messages.RunUnit(job.id, unit.attempt, call, seat, blocks, self._dispatch.order(job)))
        self._expect_a_start(worker)

    def _on_message(self, worker: WorkerState, message: object) -> None:
        match message:
            case messages.Ready():
                worker.ready = True
                self._expect_a_start(worker)
            case messages.Started(unit=id) if id in worker.jobs:
                worker.jobs[id].started = True
                self._set_alarm(worker, worker.jobs[id])
                self._expect_a_start(worker)
                self.observer.unit_started(worker.jobs[id].unit, worker.device.name)
            case messages.Alive(unit=id) if id in worker.jobs and not worker.jobs[id].hung:
                self._set_alarm(worker, worker.jobs[id])
            case messages.Call():
                self._on_call(worker, message)
            case messages.UnitDone() if message.unit in worker.jobs:
                self._on_done(worker, message)
            case messages.Withdrawn(unit=id):
                if (withdrawn := worker.jobs.pop(id, None)) is not None:
                    withdrawn.quiet()
                self._expect_a_start(worker)
                self._dispatch.now()

    def _on_call(self, worker: WorkerState, call: messages.Call) -> None:
        job = worker.jobs.get(call.unit)
        reply = None if call.call is None else CallReply(worker.process, call.call)
        if job is None or job.hung:
            # A thread that user code left behind: its trial has ended or was given up.
            if reply is not None:
                reply(None, Failure("ValueError", "the trial has ended", ""))
            return
        self._set_alarm(worker, job)
        self.observer.call(job.unit, call.name, call.args, reply)

    def _on_done(self, worker: WorkerState, done: messages.UnitDone) -> None:
        job = worker.jobs.pop(done.unit)
        job.ended = done.started + done.seconds
        job.quiet()
        self._expect_a_start(worker)
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
        if self._dispatch.depth() == 1:
            self._dispatch.soon()  # the trial's next unit can be chosen too
        else:
            self._dispatch.now()


def _blame(job: Job) -> tuple[bool, float]:
    """Sort key for the original failure in a gang: dead and hung members first, then the earliest failure."""
    return isinstance(job.future.exception(), UnitFailed), job.ended
