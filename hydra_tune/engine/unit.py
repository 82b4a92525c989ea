"""A unit: the smallest piece of work that the engine schedules, and what comes of it."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Role(StrEnum):
    """Which kind of process can run a unit."""

    DEVICE = "device"
    BUILDER = "builder"


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One call of `work(context, *args)` in a worker process.

    `work` is a module-level function and travels by name. A unit with a `worker` runs only there, because what it needs
    is resident there; when that worker is gone, the unit is lost with it.
    """

    trial: int
    attempt: str
    kind: str
    work: Callable[..., Any]
    args: tuple[Any, ...] = ()
    role: Role = Role.DEVICE
    worker: int | None = None
    remaining: float | None = None
    """Seconds of work that the trial still has, this unit included; None while nothing is measured."""
    deadline: float | None = None
    """Seconds without a sign of life, a call of user code or the end, after which the unit counts as hung."""


@dataclass(frozen=True)
class UnitResult:
    """What a unit returned, with where and when it ran."""

    value: Any
    worker: int
    device: str
    started: float
    seconds: float
    peak_bytes: int | None


@dataclass(frozen=True)
class Failure:
    """An exception of a unit as plain data: user exceptions need not survive pickling."""

    kind: str
    """The exception's class name."""
    message: str
    traceback: str
    data: dict[str, Any] = field(default_factory=dict)
    """What a failure that belongs to the project says beyond its message, such as the step of a divergence."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        text = "".join(traceback.format_exception(error))
        message = str(error) or type(error).__name__
        return cls(type(error).__name__, message, text, dict(getattr(error, "data", None) or {}))


class UnitFailed(Exception):
    """Raised where a unit was awaited: the work raised an exception in its worker."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.kind}: {failure.message}")
        self.failure = failure


class UnitHung(Exception):
    """Raised where a unit was awaited: it showed no sign of life for too long, and its worker was killed."""

    def __init__(self, message: str, stacks: str) -> None:
        super().__init__(message)
        self.stacks = stacks
