"""A unit, the smallest piece of work that the engine schedules, and its result."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hydra_tune.core.errors import HydraTuneError, shortened


@dataclass(frozen=True)
class Memory:
    """Device memory of a trial, in bytes."""

    needs: int
    """Bytes while one of the trial's units runs."""
    holds: int = 0
    """Bytes between units, until the trial is dropped; excludes state that can be spilled."""
    alone: bool = False
    """True if the trial needs a device on which no other trial holds memory: it keeps the device busy by itself."""
    spills: bool = False
    """True if the units use the device's block memory, which yields to memory that others hold.

    Such a trial holds nothing, but needs its memory while it is ahead of its last commit.
    """
    of_device: bool = False
    """True if it counts against the memory of all workers on the device together, as that of objectives does."""


class Role(StrEnum):
    """The kind of process that can run a unit."""

    DEVICE = "device"
    BUILDER = "builder"


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One call of `work(context, *args)` in a worker process.

    `work` is a module-level function and is pickled by name. A unit with a `worker` runs only there, because its state
    is resident there; if that worker is gone, the unit is lost.
    """

    trial: int
    attempt: str
    kind: str
    work: Callable[..., Any]
    args: tuple[Any, ...] = ()
    role: Role = Role.DEVICE
    worker: int | None = None
    remaining: float | None = None
    """Seconds of work left in the trial, including this unit; None before anything is measured."""
    deadline: float | None = None
    """Seconds without a sign of life (a call of user code or the end) after which the unit counts as hung."""
    recorded: bool = True
    """True if the unit gets its own row; else its strategy records many units at once."""
    memory: Memory | None = None
    """Device memory, if known; a unit that is bound to no worker waits for one with room."""
    members: tuple[int, ...] = ()
    """Trials that share the unit, its own included, if it trains several as one."""
    rank: tuple[int, int] | None = None
    """Order among the units of a batch; the smallest goes first."""


@dataclass(frozen=True)
class UnitResult:
    """The return value of a unit, with the place and time of its run."""

    value: Any
    worker: int
    device: str
    started: float
    seconds: float
    peak_bytes: int | None
    steps: tuple[StepRecord, ...] = ()
    """Steps of the unit, if the work records them."""


@dataclass(frozen=True)
class StepRecord:
    """A recorded part of a unit, such as one shard's backward."""

    kind: str
    shard: int
    started: float
    seconds: float
    read_bytes: int
    written_bytes: int
    count: int = 1
    """Number of steps that this record sums up."""


LONGEST_MESSAGE = 4_000
"""Characters of an exception's message that are shown and stored; the middle of a longer one is left out."""
LONGEST_TRACEBACK = 20_000
MOST_STEPS = 64
"""A unit with more steps is recorded as sums per kind and shard, since single short steps are of no interest."""


def summed(steps: Sequence[StepRecord]) -> tuple[StepRecord, ...]:
    """Return the steps unchanged, or one sum per kind and shard if there are many."""
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
    """Raised by work to end its trial without an error of user code; `status` is the trial's status."""

    status = ""
    facts: Any = None
    """Further plain data for the strategy that awaits the unit."""


@dataclass(frozen=True)
class Failure:
    """An exception of a unit as plain data, since user exceptions may not survive pickling."""

    kind: str
    """The exception's class name."""
    message: str
    traceback: str
    status: str = ""
    """The resulting status of the trial, if the exception defines one."""
    ours: bool = False
    """True if the message is complete without a class name and a traceback."""
    facts: Any = None
    """The `facts` of a `TrialEnded`."""
    classes: tuple[str, ...] = ()
    """Full names of the exception's class and its bases."""

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
        message, text = shortened(message, LONGEST_MESSAGE), shortened(text, LONGEST_TRACEBACK)
        classes = tuple(f"{each.__module__}.{each.__qualname__}" for each in type(error).__mro__)
        return cls(kind, message, text, status, isinstance(error, TrialEnded | HydraTuneError), facts, classes)


class UnitFailed(Exception):
    """Raised to the caller of a unit whose work raised an exception in its worker."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.kind}: {failure.message}")
        self.failure = failure


class UnitHung(Exception):
    """Raised to the caller of a unit that showed no sign of life before its deadline; its worker was killed."""

    def __init__(self, message: str, stacks: str) -> None:
        super().__init__(message)
        self.stacks = stacks
