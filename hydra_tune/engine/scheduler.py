"""Chooses the unit that a free worker takes next, from indexed ready units; no processes, clocks or I/O.

The engine asks `ReadyUnits` whenever a worker has a free slot; the simulator asks the same class on a virtual clock. A
policy is an order of units, in `POLICIES` by name. `lrtf` is Hydra's Sharded-LRTF (arXiv 2107.06469): among the trials
without a unit in flight, the one with the longest remaining time goes first. It changes trial at almost every unit, and
each change loads another shard; `lazy-lrtf` stays with its trial unless that would cost more than a slack.

A query takes some microseconds for any number of waiting units: they are kept in heaps, one for each worker that units
are bound to and one for unbound units, and removed entries are skipped later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from hydra_tune.engine.unit import Memory, Role

SLOTS = 2
"""Units per worker: one that runs and one that waits there."""
SLACK_SECONDS = 5.0
"""A lazy worker leaves its trial only for one that has at least these seconds more to go."""
MOVE_SLACK_SECONDS = 3.0
"""A lazy worker fetches another worker's trial only if it has at least these seconds more to go."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """The scheduler's view of a worker."""

    worker: int
    role: Role
    current: str | None = None
    """Attempt of the last unit assigned to the worker."""
    memory: int = 0
    """Device memory in bytes."""
    held: Mapping[str, Memory] = field(default_factory=dict)
    """Device memory of each attempt."""
    device_memory: int = 0
    """Memory in bytes of all workers on the same device."""
    device_held: Mapping[str, Memory] = field(default_factory=dict)
    """Memory of each attempt on any worker of the device, if it counts there."""

    def has_room(self, attempt: str, wanted: Memory) -> bool:
        """True if a trial fits here: any running trial has its need beside the memory that all others hold.

        Trials that spill take turns in the remaining memory; a trial that wants the device alone needs an empty one.
        """
        if wanted.of_device:
            return self._device_has_room(attempt, wanted)
        if attempt in self.held or not self.held:
            return True
        everybody = [*self.held.values(), wanted]
        if wanted.alone or (any(other.alone for other in self.held.values()) and not wanted.spills):
            return False
        held = sum(each.holds for each in everybody)
        return held + max(each.needs - each.holds for each in everybody) <= self.memory

    def _device_has_room(self, attempt: str, wanted: Memory) -> bool:
        """True if the device has the memory for one more objective; the first one is never refused."""
        others = [memory for other, memory in self.device_held.items() if other != attempt]
        if not others:
            return True
        if wanted.alone or any(each.alone for each in others):
            return False
        return wanted.needs + sum(each.needs for each in others) <= self.device_memory


@dataclass(frozen=True, slots=True)
class Ready:
    """A unit that could run now, identified by `key`, the engine's job."""

    key: Hashable
    trial: int
    attempt: str
    role: Role = Role.DEVICE
    worker: int | None = None
    """The only worker that may run the unit; None if any may."""
    home: int | None = None
    """The worker that holds the trial's state now; None if no worker is nearer than another."""
    remaining: float | None = None
    """Expected seconds of work left in the trial; None before anything is measured."""
    arrival: int = 0
    """Sequence number at which the unit became ready."""
    last_turn: int = -1
    """Sequence number of the trial's last hand-out; -1 for never."""
    memory: Memory | None = None
    """Device memory of the trial; None if unknown, and the unit may go anywhere."""
    rank: tuple[int, int] | None = None
    """Order among the units of a batch; the smallest goes first."""


Order: TypeAlias = Callable[[Ready], tuple[float, ...]]
"""Sort key; the smallest goes first."""


@dataclass(frozen=True)
class Policy:
    """An order of units, and how far a worker may depart from it to avoid a move."""

    order: Order
    drawn: bool = False
    """True if `order` draws a unit's waiting time from its arrival on, instead of a fixed rank."""
    in_stages: bool = False
    """True for trials whose every unit is bound to a worker, in an order that does not change while they wait.

    Such units can all wait at their workers.
    """
    lazy: bool = False
    slack: float = 0.0
    """Seconds. A lazy worker stays with its trial while no other has more than this much longer to go."""
    move_slack: float = 0.0
    """Seconds. A lazy worker prefers trials held there while no other has more than this much longer to go."""

    @property
    def slots(self) -> int:
        """Units that a worker has at a time, including the waiting one.

        A lazy worker gets its next unit only when it is idle, so that its own trial's next unit can be chosen.
        """
        return 1 if self.lazy else SLOTS


def fifo(ready: Ready) -> tuple[float, ...]:
    """Order by arrival."""
    return (ready.arrival,)


def fair(ready: Ready) -> tuple[float, ...]:
    """Order by the trial's last turn, oldest first, so that trials that share devices reach their reports together.

    Pruners compare trials at the same epoch: turns keep them comparable. Trials already begun go before new ones, which
    would only take more memory.
    """
    return (0 if ready.last_turn >= 0 else 1, ready.last_turn, ready.arrival)


def ranked(ready: Ready) -> tuple[float, ...]:
    """Order by rank, then arrival; units without a rank, such as an optimizer's step, go first."""
    return (*((-1, 0) if ready.rank is None else ready.rank), ready.arrival)


def oldest(ready: Ready) -> tuple[float, ...]:
    """Order by trial number, oldest first: the builder's order for every device policy.

    A device waits for the oldest trial's build. By turns, all trials would be built before the first can be trained.
    """
    return (ready.trial, ready.arrival)


def longest_remaining(ready: Ready) -> tuple[float, ...]:
    """Order by remaining work, longest first, which keeps the end of a search short.

    Trials not measured yet go first: they have to begin to be measured.
    """
    return (-_left(ready), ready.arrival)


def shortest_remaining(ready: Ready) -> tuple[float, ...]:
    """Order by remaining work, shortest first, which ends the first trials soonest; unmeasured trials go first."""
    return (-1.0 if ready.remaining is None else ready.remaining, ready.arrival)


def shuffled(seed: int) -> Order:
    """Return an order that picks any waiting unit with equal chance, repeatable by seed, trial and arrival.

    A fixed random rank would starve units of bad rank. Waits are drawn from the exponential distribution, which is
    memoryless: every waiting unit has the same chance to be next, however long it has waited.
    """

    def wait(ready: Ready) -> tuple[float, ...]:
        mixed = _mixed(_mixed(seed) ^ _mixed(ready.trial + 1) ^ ready.arrival)
        return (-math.log((mixed + 1) / 2**64), ready.arrival)

    return wait


POLICIES: dict[str, Policy] = {
    "fair": Policy(fair),
    "fifo": Policy(fifo),
    "ranked": Policy(ranked, in_stages=True),
    "lrtf": Policy(longest_remaining),
    "lazy-lrtf": Policy(longest_remaining, lazy=True, slack=SLACK_SECONDS, move_slack=MOVE_SLACK_SECONDS),
    "srtf": Policy(shortest_remaining),
    "random": Policy(shuffled(0), drawn=True),
}
FOR_WHOLE_TRIALS = tuple(name for name, policy in POLICIES.items() if not policy.in_stages)
"""Policies for searches in which a unit is a slice of a trial."""


def tuned(name: str, *, slack: float | None = None, move_slack: float | None = None, seed: int = 0) -> Policy:
    """Return the named policy, with other slacks if it is lazy, or another seed if it is random."""
    policy = POLICIES[name]
    if name == "random":
        return replace(policy, order=shuffled(seed))
    if not policy.lazy:
        return policy
    slack = policy.slack if slack is None else slack
    # The move slack never exceeds the slack.
    return replace(policy, slack=slack, move_slack=min(policy.move_slack, slack) if move_slack is None else move_slack)


_Entry: TypeAlias = tuple[tuple[float, ...], int, Ready]
_Pool: TypeAlias = tuple[Role, int | None]


class _Heap:
    """Entries in the policy's order. Removed entries are dropped when they reach the top."""

    __slots__ = ("entries", "live")

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.live = 0

    def add(self, entry: _Entry) -> None:
        heappush(self.entries, entry)
        self.live += 1

    def first(self, live: dict[Hashable, _Entry], worker: WorkerView | None = None) -> _Entry | None:
        """Return the first live entry, and with a `worker` the first that it has room for."""
        entries, passed = self.entries, list[_Entry]()
        found = None
        while entries and found is None:
            entry = entries[0]
            if live.get(entry[2].key) is not entry:
                heappop(entries)
            elif worker is not None and not _has_room(entry[2], worker):
                passed.append(heappop(entries))
            else:
                found = entry
        for entry in passed:
            heappush(entries, entry)
        return found

    def lost_one(self, live: dict[Hashable, _Entry]) -> None:
        """Account for an entry that left `live`; sweep out dead entries if there are too many."""
        self.live -= 1
        if len(self.entries) > 2 * self.live + 32:
            self.entries = [entry for entry in self.entries if live.get(entry[2].key) is entry]
            heapify(self.entries)


class ReadyUnits:
    """The units that could run now; `take` chooses one for a worker by the policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._live: dict[Hashable, _Entry] = {}
        self._count = 0
        self._drawn_until = 0.0
        self._pools: dict[_Pool, _Heap] = {}
        # Used by lazy policies only: unbound units by home worker, and entries by attempt.
        self._homes: dict[_Pool, _Heap] = {}
        self._attempts: dict[str, dict[Hashable, _Entry]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Ready]:
        return (entry[2] for entry in list(self._live.values()))

    def __contains__(self, key: Hashable) -> bool:
        return key in self._live

    def of_attempt(self, attempt: str) -> list[Ready]:
        """Return the ready units of one attempt."""
        return [entry[2] for entry in self._attempts.get(attempt, {}).values()]

    def add(self, ready: Ready) -> None:
        """Add a unit that could run now; replace one with the same key."""
        self.discard(ready.key)
        self._count += 1
        order = self.order(ready)
        if self.policy.drawn and ready.role is Role.DEVICE:
            order = (self._drawn_until + order[0], *order[1:])
        # The count orders equal units by arrival and keeps tuples from comparing units.
        entry = (order, self._count, ready)
        self._live[ready.key] = entry
        self._attempts.setdefault(ready.attempt, {})[ready.key] = entry
        for heap in self._heaps_of(ready):
            heap.add(entry)

    def order(self, ready: Ready) -> tuple[float, ...]:
        """Return the sort key, smallest first; the builder has its own order."""
        return oldest(ready) if ready.role is Role.BUILDER else self.policy.order(ready)

    def discard(self, key: Hashable) -> None:
        """Remove a unit, if present."""
        entry = self._live.pop(key, None)
        if entry is None:
            return
        ready = entry[2]
        siblings = self._attempts[ready.attempt]
        del siblings[key]
        if not siblings:
            del self._attempts[ready.attempt]
        for heap in self._heaps_of(ready):
            heap.lost_one(self._live)

    def take(self, worker: WorkerView) -> Ready | None:
        """Remove and return the unit that `worker` runs next; None if there is none."""
        entry = self._choice(worker)
        if entry is None:
            return None
        self.discard(entry[2].key)
        if self.policy.drawn and entry[2].role is Role.DEVICE:
            self._drawn_until = max(self._drawn_until, entry[0][0])
        return entry[2]

    def peek(self, worker: WorkerView) -> Ready | None:
        """Return the unit that `take` would return, without removing it."""
        entry = self._choice(worker)
        return None if entry is None else entry[2]

    def _choice(self, worker: WorkerView) -> _Entry | None:
        best = self._first(self._pools, worker)
        if best is None or not self.policy.lazy or worker.role is Role.BUILDER:
            return best
        return self._spare_a_move(best, worker)

    def _spare_a_move(self, best: _Entry, worker: WorkerView) -> _Entry:
        """Prefer the worker's own trial within the slack, else a trial held there within the move slack."""
        longest = _left(best[2])
        if worker.current is not None:
            own = [entry for entry in self._attempts.get(worker.current, {}).values() if can_run(entry[2], worker)]
            if own and _behind(longest, min(own)) <= self.policy.slack:
                return min(own)
        near = self._first(self._homes, worker)
        return near if near is not None and _behind(longest, near) <= self.policy.move_slack else best

    def _first(self, pools: dict[_Pool, _Heap], worker: WorkerView) -> _Entry | None:
        """Return the first entry among the units bound to the worker and the unbound ones."""
        best = None
        for place in (worker.worker, None):
            heap = pools.get((worker.role, place))
            entry = heap.first(self._live, worker) if heap is not None else None
            if entry is not None and (best is None or entry < best):
                best = entry
        return best

    def _heaps_of(self, ready: Ready) -> Iterator[_Heap]:
        yield _heap(self._pools, (ready.role, ready.worker))
        if self.policy.lazy:
            yield _heap(self._homes, (ready.role, ready.home if ready.worker is None else ready.worker))


def can_run(ready: Ready, worker: WorkerView) -> bool:
    """True if `worker` may take the unit: same role, and bound to this worker or else with room for it."""
    return ready.role == worker.role and ready.worker in (None, worker.worker) and _has_room(ready, worker)


def _has_room(ready: Ready, worker: WorkerView) -> bool:
    """True if the worker has memory for the unit; a bound unit has its memory already."""
    return ready.memory is None or ready.worker is not None or worker.has_room(ready.attempt, ready.memory)


def _heap(pools: dict[_Pool, _Heap], pool: _Pool) -> _Heap:
    heap = pools.get(pool)
    if heap is None:
        heap = pools[pool] = _Heap()
    return heap


def _left(ready: Ready) -> float:
    return math.inf if ready.remaining is None else ready.remaining


def _behind(longest: float, entry: _Entry) -> float:
    """Return the seconds by which a unit's trial has less to go than the longest; 0 if neither is measured."""
    left = _left(entry[2])
    return 0.0 if left == longest else longest - left


def _mixed(value: int) -> int:
    """Hash a 64-bit number (splitmix64), so that close numbers give distant ones."""
    value = (value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)
