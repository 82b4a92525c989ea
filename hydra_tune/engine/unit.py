"""A unit: the smallest piece of work that the engine schedules, and what comes of it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hydra_tune.errors import HydraTuneError


@dataclass(frozen=True)
class Memory:
    """What a trial takes of a device, in bytes."""

    needs: int
    """While one of its units runs."""
    holds: int = 0
    """Between its units, until it is dropped; what can be spilled does not count."""
    alone: bool = False
    """Whether it goes only where no other trial holds anything: it will keep the device busy by itself."""
    spills: bool = False
    """Whether its units work in the device's block memory, which gives way to what others hold; such a trial holds
    nothing, but needs its place while it is ahead of its last commit."""


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
    recorded: bool = True
    """Whether it gets a row of its own; else its strategy records many at once."""
    memory: Memory | None = None
    """What it takes of its device, where that is known; a unit that is bound to no worker waits for one with room."""
    rank: tuple[int, int] | None = None
    """Where a batch is many units, of several kinds: the least goes first."""


@dataclass(frozen=True)
class UnitResult:
    """What a unit returned, with where and when it ran."""

    value: Any
    worker: int
    device: str
    started: float
    seconds: float
    peak_bytes: int | None
    steps: tuple[StepRecord, ...] = ()
    """What it was made of, where the work says so."""


@dataclass(frozen=True)
class StepRecord:
    """A part of a unit that is of interest by itself, such as one shard's backward."""

    kind: str
    shard: int
    started: float
    seconds: float
    read_bytes: int
    written_bytes: int
    count: int = 1
    """How many such steps this stands for."""


MOST_STEPS = 64
"""A unit of more steps is recorded by the sums over each kind and shard: a step of a millisecond is no news."""


def summed(steps: Sequence[StepRecord]) -> tuple[StepRecord, ...]:
    """The steps one by one, or, where there are many, one for each kind and shard."""
    if len(steps) <= MOST_STEPS:
        return tuple(steps)
    sums: dict[tuple[str, int], StepRecord] = {}
    for step in steps:
        before = sums.get((step.kind, step.shard))
        sums[step.kind, step.shard] = step if before is None else StepRecord(
            step.kind, step.shard, before.started, before.seconds + step.seconds, before.read_bytes + step.read_bytes,
            before.written_bytes + step.written_bytes, before.count + step.count,
        )  # fmt: skip
    return tuple(sums.values())


class TrialEnded(Exception):
    """Raised by work to end its trial in a way that is no mistake of user code; `status` says which."""

    status = ""
    facts: Any = None
    """What the strategy that awaits the unit should know besides, as plain data."""


@dataclass(frozen=True)
class Failure:
    """An exception of a unit as plain data: user exceptions need not survive pickling."""

    kind: str
    """The exception's class name."""
    message: str
    traceback: str
    status: str = ""
    """What it makes of the trial, where the exception says so itself."""
    ours: bool = False
    """Whether the message says all there is to say, without a class name and a traceback."""
    facts: Any = None
    """Those of a `TrialEnded`."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        kind = type(error).__name__
        status, facts = (error.status, error.facts) if isinstance(error, TrialEnded) else ("", None)
        if kind == "OutOfMemoryError" and type(error).__module__.startswith("torch"):
            status = "OUT_OF_MEMORY"
        try:
            message, text = str(error) or kind, "".join(traceback.format_exception(error))
        except Exception as broken:  # noqa: BLE001 - even an exception's own text is user code
            message, text = f"{kind} (its message cannot be shown: {type(broken).__name__})", ""
        return cls(kind, message, text, status, isinstance(error, TrialEnded | HydraTuneError), facts)


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
