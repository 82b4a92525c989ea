"""Messages between the coordinator and its workers, over one channel per worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hydra_tune.engine.gangs import Seat
from hydra_tune.engine.unit import Failure, StepRecord


class RemoteError(Exception):
    """The coordinator answered a call with an error; `kind` is the name of its class."""

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Setup:
    """First message to a worker: its id, device, directories, import path and environment."""

    worker: int
    device: str
    torch_device: str
    memory: int
    threads: int
    directory: str
    """The run's directory for data exchanged between processes, in host memory if there is room."""
    overflow: tuple[str, ...]
    """Directories for spilled state when `directory` is full."""
    sys_path: tuple[str, ...]
    cwd: str
    environment: dict[str, str]
    warm: tuple[str, ...] = ()
    """Modules to import before the first unit arrives."""


@dataclass(frozen=True)
class RunUnit:
    """Run this unit, before waiting units that follow it in the scheduler's order."""

    unit: int
    attempt: str
    call: bytes
    """Pickled function and arguments.

    The thread that runs the unit unpickles them: this may import modules, and an error is the unit's failure.
    """
    seat: Seat | None = None
    """The unit's seat in a gang, if any."""
    blocks: int | None = None
    """Bytes that the device's block memory may use meanwhile, if known."""
    order: tuple[float, ...] = ()
    """Sort key: the smallest runs first; ties in order of arrival."""


@dataclass(frozen=True)
class Withdraw:
    """Do not start this unit if it still waits."""

    unit: int


@dataclass(frozen=True)
class Drop:
    """Free all resident state of this attempt."""

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
    """A unit has left the next slot and runs."""

    unit: int


@dataclass(frozen=True)
class Alive:
    """A long unit is still making progress."""

    unit: int


@dataclass(frozen=True)
class Call:
    """Call from user code in `unit` to the coordinator; `call` is None if no reply is expected."""

    unit: int
    call: int | None
    name: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class UnitDone:
    """A unit ended; exactly one of `value` and `failure` is meaningful."""

    unit: int
    value: Any
    failure: Failure | None
    started: float
    seconds: float
    peak_bytes: int | None
    steps: tuple[StepRecord, ...] = ()


@dataclass(frozen=True)
class Withdrawn:
    """A unit was withdrawn before it started; its slot is free."""

    unit: int
