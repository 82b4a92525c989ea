"""Which unit a free worker takes next: pure functions, without processes, clocks or I/O.

The engine calls `choose` whenever a worker has a free slot; a simulator can call it just as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from hydra_tune.engine.unit import Role, Unit


@dataclass(frozen=True)
class WorkerView:
    """What the scheduler may know of a worker."""

    worker: int
    role: Role
    resident: Collection[str] = ()
    """Attempts whose state is in this worker's memory."""


@dataclass(frozen=True)
class Waiting:
    """A ready unit, in the order in which it became ready, with its trial's last turn."""

    unit: Unit
    arrival: int
    last_turn: int
    """When a unit of this trial was last handed out, as a count of hand-outs; -1 for never."""


Policy: TypeAlias = Callable[[Waiting], tuple[float, ...]]
"""A sort key: the least one goes first."""


def fifo(waiting: Waiting) -> tuple[float, ...]:
    """First ready, first served."""
    return (waiting.arrival,)


def fair(waiting: Waiting) -> tuple[float, ...]:
    """The trial whose last turn is longest ago, so that trials that share devices reach their reports together.

    Pruners compare trials at the same epoch: turns keep them comparable. Trials already begun go before new ones,
    which would only take more memory.
    """
    begun = waiting.last_turn >= 0
    return (0 if begun else 1, waiting.last_turn, waiting.arrival)


def longest_remaining(waiting: Waiting) -> tuple[float, ...]:
    """The trial with the most work left, which keeps the end of a search short (Hydra's LRTF)."""
    left = waiting.unit.remaining
    return (-left if left is not None else float("-inf"), waiting.arrival)


POLICIES: dict[str, Policy] = {"fair": fair, "fifo": fifo, "lrtf": longest_remaining}


def can_run(unit: Unit, worker: WorkerView) -> bool:
    """Whether `worker` may take `unit`: the right kind of process, and the right one where state is resident."""
    return unit.role == worker.role and unit.worker in (None, worker.worker)


def choose(waiting: Iterable[Waiting], worker: WorkerView, policy: Policy = fair) -> Unit | None:
    """The unit that `worker` takes next, or None when nothing waits for it."""
    fitting = [w for w in waiting if can_run(w.unit, worker)]
    return min(fitting, key=policy).unit if fitting else None
