"""The engine's records of units and workers, and the observer interface that reports them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from hydra_tune.core.devices import Device
from hydra_tune.engine import messages
from hydra_tune.engine.gangs import Gang
from hydra_tune.engine.scheduler import WorkerView
from hydra_tune.engine.unit import Failure, Memory, Role, Unit, UnitResult
from hydra_tune.engine.worker_processes import Process

Answer: TypeAlias = Callable[[Any, Failure | None], None]


class Observer(Protocol):
    """Callbacks from the engine to its owner."""

    def unit_started(self, unit: Unit, device: str) -> None: ...

    def unit_ended(self, unit: Unit, result: UnitResult) -> None: ...

    def worker_line(self, device: str, line: str) -> None: ...

    def worker_lost(self, device: str, reason: str) -> None: ...

    def late_result(self, unit: Unit, device: str) -> None:
        """Called when a unit that was given up as hung ended after all; its result was refused."""
        ...

    def call(self, unit: Unit, name: str, args: tuple[Any, ...], reply: Answer | None) -> None:
        """Handle a call from user code in `unit`; `reply(value, failure)` may be called from any thread."""
        ...


@dataclass
class Job:
    """A unit on its way through the engine."""

    id: int
    unit: Unit
    future: asyncio.Future[UnitResult]
    arrival: int
    gang: Gang | None = None
    """The unit's gang; the unit starts when all members are seated."""
    started: bool = False
    hung: bool = False
    ended: float = 0.0
    """End of the unit's work by the worker's clock, in seconds since 1970."""
    alarm: asyncio.TimerHandle | None = None
    heard: float = 0.0
    """Time of the last sign of life, by the event loop's clock."""

    def quiet(self) -> None:
        """Cancel the alarm."""
        if self.alarm is not None:
            self.alarm.cancel()
            self.alarm = None


@dataclass
class WorkerState:
    """A worker process and the units assigned to it."""

    id: int
    role: Role
    device: Device
    process: Process
    jobs: dict[int, Job] = field(default_factory=dict)
    resident: set[str] = field(default_factory=set)
    current: str | None = None
    """Attempt of the last unit assigned."""
    ready: bool = False
    held: dict[str, Memory] = field(default_factory=dict)
    """Device memory of each attempt, as far as known."""

    def take(self, job: Job) -> None:
        """Record that a job was given to the worker."""
        self.jobs[job.id] = job
        self.current = job.unit.attempt
        self.resident.add(job.unit.attempt)
        if job.unit.memory is not None:
            self.held[job.unit.attempt] = job.unit.memory

    def view(self, beside: Iterable[WorkerState] = ()) -> WorkerView:
        """Return the scheduler's view; `beside` are all workers of the device, if their memory counts together."""
        held = {
            attempt: memory for worker in beside for attempt, memory in worker.held.items() if memory.of_device
        }  # fmt: skip
        return WorkerView(
            self.id, self.role, self.current, self.device.memory, self.held,
            sum(worker.device.memory for worker in beside), held,
        )  # fmt: skip

    def room_beside(self, attempt: str) -> int:
        """Return the bytes that other attempts leave on the device while this attempt runs."""
        return self.device.memory - sum(memory.holds for other, memory in self.held.items() if other != attempt)

    def free_beside(self, attempt: str) -> int:
        """Return the bytes that other attempts leave on the device whichever of them runs."""
        others = [memory for other, memory in self.held.items() if other != attempt]
        return self.room_beside(attempt) - max((memory.needs - memory.holds for memory in others), default=0)


@dataclass(frozen=True)
class CallReply:
    """Replies to one call of user code; usable from any thread."""

    process: Process
    call: int

    def __call__(self, value: Any, failure: Failure | None) -> None:
        self.process.send(messages.Reply(self.call, value, failure))


@dataclass(frozen=True)
class Load:
    """Load of the devices, as seen by one attempt."""

    idle: int
    """Devices without work."""
    waiting: int
    """Units of other attempts that wait for a device."""
    others: int
    """Number of other attempts that have units."""
