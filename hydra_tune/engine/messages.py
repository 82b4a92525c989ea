"""What the coordinator and its workers say to each other, one channel for each worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hydra_tune.engine.gangs import Seat
from hydra_tune.engine.unit import Failure, StepRecord


@dataclass(frozen=True)
class Setup:
    """The first message to a worker: who it is, and where it finds the user's modules."""

    worker: int
    device: str
    torch_device: str
    memory: int
    threads: int
    directory: str
    """The run's directory for what processes hand to each other, in host memory where that has room."""
    overflow: tuple[str, ...]
    """Where spilled state goes when that directory is full."""
    sys_path: tuple[str, ...]
    cwd: str
    warm: tuple[str, ...] = ()
    """Modules that its units are going to want: there is time to import them before the first one comes."""


@dataclass(frozen=True)
class Run:
    """Run this unit, before those that wait and come after it in the scheduler's order."""

    unit: int
    attempt: str
    work: Callable[..., Any]
    args: tuple[Any, ...]
    seat: Seat | None = None
    """Its place in a gang, where it runs with others."""
    blocks: int | None = None
    """What the device's block memory may take meanwhile, where that is known."""
    order: tuple[float, ...] = ()
    """The least goes first; of equal ones the first that came."""


@dataclass(frozen=True)
class Withdraw:
    """Do not start this unit, if it still waits."""

    unit: int


@dataclass(frozen=True)
class Drop:
    """Free whatever is resident for this attempt."""

    attempt: str


@dataclass(frozen=True)
class Reply:
    """The answer to a Call."""

    call: int
    value: Any
    failure: Failure | None = None


@dataclass(frozen=True)
class Ready:
    """A worker has finished its imports."""

    pid: int


@dataclass(frozen=True)
class Started:
    """A unit left the next slot and runs."""

    unit: int


@dataclass(frozen=True)
class Alive:
    """A unit that takes long is getting on."""

    unit: int


@dataclass(frozen=True)
class Call:
    """User code in unit `unit` asks the coordinator something; `call` is None where no answer is awaited."""

    unit: int
    call: int | None
    name: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Done:
    """A unit ended; exactly one of `value` and `failure` means something."""

    unit: int
    value: Any
    failure: Failure | None
    started: float
    seconds: float
    peak_bytes: int | None
    steps: tuple[StepRecord, ...] = ()


@dataclass(frozen=True)
class Withdrawn:
    """A unit was withdrawn before it started: its slot is free."""

    unit: int
