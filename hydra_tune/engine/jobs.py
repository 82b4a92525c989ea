"""What the engine keeps of units on their way and of its workers, and whom it tells of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from hydra_tune.devices import Device
from hydra_tune.engine import messages
from hydra_tune.engine.gangs import Gang
from hydra_tune.engine.process import WorkerProcess
from hydra_tune.engine.scheduler import WorkerView
from hydra_tune.engine.unit import Failure, Memory, Role, Unit, UnitResult

Answer: TypeAlias = Callable[[Any, Failure | None], None]


class Observer(Protocol):
    """What the engine tells whoever runs it."""

    def unit_started(self, unit: Unit, device: str) -> None: ...

    def unit_ended(self, unit: Unit, result: UnitResult) -> None: ...

    def worker_line(self, device: str, line: str) -> None: ...

    def worker_lost(self, device: str, reason: str) -> None: ...

    def late_result(self, unit: Unit, device: str) -> None:
        """A unit that had been given up for hung ended after all; its result was refused."""
        ...

    def call(self, unit: Unit, name: str, args: tuple[Any, ...], reply: Answer | None) -> None:
        """User code in `unit` asks something; `reply(value, failure)` may be called from any thread."""
        ...


@dataclass
class Job:
    """A unit on its way through the engine."""

    id: int
    unit: Unit
    future: asyncio.Future[UnitResult]
    arrival: int
    gang: Gang | None = None
    """The gang it is a member of; it starts when all are seated."""
    started: bool = False
    hung: bool = False
    ended: float = 0.0
    """When its work ended, by the worker's clock."""
    alarm: asyncio.TimerHandle | None = None

    def quiet(self) -> None:
        """No more alarm."""
        if self.alarm is not None:
            self.alarm.cancel()
            self.alarm = None


@dataclass
class WorkerState:
    """A worker process and what it has been given."""

    id: int
    role: Role
    device: Device
    process: WorkerProcess
    jobs: dict[int, Job] = field(default_factory=dict)
    resident: set[str] = field(default_factory=set)
    current: str | None = None
    """The attempt whose unit it was given last."""
    ready: bool = False
    held: dict[str, Memory] = field(default_factory=dict)
    """What attempts take of its device, as far as that is known."""

    def view(self) -> WorkerView:
        return WorkerView(self.id, self.role, self.current, self.device.memory, self.held)

    def room_beside(self, attempt: str) -> int:
        """What others leave of the device while the attempt runs."""
        return self.device.memory - sum(memory.holds for other, memory in self.held.items() if other != attempt)

    def free_beside(self, attempt: str) -> int:
        """What others leave of the device whichever of them runs."""
        others = [memory for other, memory in self.held.items() if other != attempt]
        return self.room_beside(attempt) - max((memory.needs - memory.holds for memory in others), default=0)


@dataclass(frozen=True)
class CallReply:
    """Answers one call of user code; from any thread."""

    process: WorkerProcess
    call: int

    def __call__(self, value: Any, failure: Failure | None) -> None:
        self.process.send(messages.Reply(self.call, value, failure))


@dataclass(frozen=True)
class Load:
    """How busy the devices are."""

    idle: int
    """Devices that have nothing to do."""
    waiting: int
    """Units of other attempts that wait for a device."""
    others: int
    """Other attempts that have units."""
