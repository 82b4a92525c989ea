"""Which unit a free worker takes next: ready units, indexed by policy, without processes, clocks or I/O.

The engine asks `ReadyUnits` whenever a worker has a free slot; the simulator asks the same class on a virtual clock. A
policy is an order of units, in `POLICIES` by name. `lrtf` is Hydra's Sharded-LRTF (arXiv 2107.06469): of the trials
without a unit in flight, the one with the longest remaining time goes first. It changes trial at almost every unit, and
each change brings another shard in; `lazy-lrtf` stays where it is unless that would cost more than a slack.

Asking costs some microseconds whatever the number of waiting units: they stand in heaps, one for each worker that
units are bound to and one for those that may go anywhere, and what was taken out of the middle is skipped later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from hydra_tune.engine.unit import Memory, Role

SLACK_SECONDS = 5.0
"""How much longer another trial may have to go before a lazy worker leaves its own."""
MOVE_SLACK_SECONDS = 3.0
"""How much longer a trial of another worker must have to go before a lazy worker fetches it."""


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What the scheduler may know of a worker."""

    worker: int
    role: Role
    current: str | None = None
    """The attempt of which it ran a unit last."""
    memory: int = 0
    """Bytes of its device."""
    held: Mapping[str, Memory] = field(default_factory=dict)
    """What attempts take of it."""

    def has_room(self, attempt: str, wanted: Memory) -> bool:
        """Whether a trial can come here: whoever runs has what it needs beside what all others hold.

        Those that spill take turns in what is left, and one that wants the device to itself goes where nobody is.
        """
        if attempt in self.held or not self.held:
            return True
        everybody = [*self.held.values(), wanted]
        if wanted.alone or (any(other.alone for other in self.held.values()) and not wanted.spills):
            return False
        held = sum(each.holds for each in everybody)
        return held + max(each.needs - each.holds for each in everybody) <= self.memory


@dataclass(frozen=True, slots=True)
class Ready:
    """A unit that could run now. It is known by its `key`, the engine's job."""

    key: Hashable
    trial: int
    attempt: str
    role: Role = Role.DEVICE
    worker: int | None = None
    """The only worker that may run it, where it is bound to one."""
    home: int | None = None
    """The worker that holds the trial's state now; None where no worker is nearer than another."""
    remaining: float | None = None
    """Expected seconds of work that the trial has left; None while nothing is measured."""
    arrival: int = 0
    """When it became ready, as a count."""
    last_turn: int = -1
    """When a unit of this trial was last handed out, as a count of hand-outs; -1 for never."""
    memory: Memory | None = None
    """What its trial takes of a device; None where nobody knows, and it goes anywhere."""
    rank: tuple[int, int] | None = None
    """Where a batch is many units, of several kinds: the least goes first."""


Order: TypeAlias = Callable[[Ready], tuple[float, ...]]
"""A sort key: the least one goes first."""


@dataclass(frozen=True)
class Policy:
    """An order of units, and how far a worker may depart from it to spare a move."""

    order: Order
    drawn: bool = False
    """Whether `order` draws how long a unit waits from its arrival on, instead of ranking it once and for all."""
    in_stages: bool = False
    """Whether it is for trials whose every unit has its worker, in an order that does not change while they wait: they
    can all wait at their workers."""
    lazy: bool = False
    slack: float = 0.0
    """A lazy worker stays with its trial while no other has more than these seconds longer to go."""
    move_slack: float = 0.0
    """A lazy worker prefers a trial that is at home with it while no other has more than these seconds longer to go."""


def fifo(ready: Ready) -> tuple[float, ...]:
    """First ready, first served."""
    return (ready.arrival,)


def fair(ready: Ready) -> tuple[float, ...]:
    """The trial whose last turn is longest ago, so that trials that share devices reach their reports together.

    Pruners compare trials at the same epoch: turns keep them comparable. Trials already begun go before new ones,
    which would only take more memory.
    """
    return (0 if ready.last_turn >= 0 else 1, ready.last_turn, ready.arrival)


def ranked(ready: Ready) -> tuple[float, ...]:
    """The least rank, then first come, first served; what has none, such as an optimizer's step, goes before all."""
    return (*((-1, 0) if ready.rank is None else ready.rank), ready.arrival)


def oldest(ready: Ready) -> tuple[float, ...]:
    """The trial that began first: what the builder does for it, a device is waiting for.

    Whatever the policy of the devices. By turns, all trials would be built before the first one can be trained.
    """
    return (ready.trial, ready.arrival)


def longest_remaining(ready: Ready) -> tuple[float, ...]:
    """The trial with the most work left, which keeps the end of a search short.

    What is not measured yet goes first: it has to be begun to be measured.
    """
    return (-_left(ready), ready.arrival)


def shortest_remaining(ready: Ready) -> tuple[float, ...]:
    """The trial with the least work left, which ends the first trials soonest; the unmeasured go first here too."""
    return (-1.0 if ready.remaining is None else ready.remaining, ready.arrival)


def shuffled(seed: int) -> Order:
    """Any waiting unit with equal chance, by the seed, the trial and its arrival only: runs can be repeated.

    A rank by chance would not do: units of bad rank would stay behind for ever. Waits are drawn from the exponential
    distribution, which has no memory: whoever waits has the same chance to be next, however long it has waited.
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
"""Those that can be chosen where a unit is a slice of a trial."""


def tuned(name: str, *, slack: float | None = None, move_slack: float | None = None, seed: int = 0) -> Policy:
    """The policy of that name, with other slacks where it is lazy, or another seed where it is random."""
    policy = POLICIES[name]
    if name == "random":
        return replace(policy, order=shuffled(seed))
    if not policy.lazy:
        return policy
    slack = policy.slack if slack is None else slack
    # Fetching a trial from elsewhere is no better a reason to move than leaving one's own.
    return replace(policy, slack=slack, move_slack=min(policy.move_slack, slack) if move_slack is None else move_slack)


_Entry: TypeAlias = tuple[tuple[float, ...], int, Ready]
_Pool: TypeAlias = tuple[Role, int | None]


class _Heap:
    """Entries in the policy's order. Those that are no longer live are dropped when they come to the top."""

    __slots__ = ("entries", "live")

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.live = 0

    def add(self, entry: _Entry) -> None:
        heappush(self.entries, entry)
        self.live += 1

    def first(self, live: dict[Hashable, _Entry], worker: WorkerView | None = None) -> _Entry | None:
        """The first that is live and, where a worker is given, that it has room for."""
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
        """An entry has left `live`. Too many dead ones are swept out, so that memory stays with the living."""
        self.live -= 1
        if len(self.entries) > 2 * self.live + 32:
            self.entries = [entry for entry in self.entries if live.get(entry[2].key) is entry]
            heapify(self.entries)


class ReadyUnits:
    """The units that could run now; `take` gives a worker the one that the policy wants there."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._live: dict[Hashable, _Entry] = {}
        self._count = 0
        self._drawn_until = 0.0
        self._pools: dict[_Pool, _Heap] = {}
        # Only a lazy policy asks for these two: units that may go anywhere, by where their trial is at home.
        self._homes: dict[_Pool, _Heap] = {}
        self._attempts: dict[str, dict[Hashable, _Entry]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Ready]:
        return (entry[2] for entry in list(self._live.values()))

    def __contains__(self, key: Hashable) -> bool:
        return key in self._live

    def of_attempt(self, attempt: str) -> list[Ready]:
        """The ready units of one attempt."""
        return [entry[2] for entry in self._attempts.get(attempt, {}).values()]

    def add(self, ready: Ready) -> None:
        """A unit could run now; one of the same key is replaced."""
        self.discard(ready.key)
        self._count += 1
        order = self.order(ready)
        if self.policy.drawn and ready.role is Role.DEVICE:
            order = (self._drawn_until + order[0], *order[1:])
        # The count keeps equal units in the order in which they came, and tuples from comparing units.
        entry = (order, self._count, ready)
        self._live[ready.key] = entry
        self._attempts.setdefault(ready.attempt, {})[ready.key] = entry
        for heap in self._heaps_of(ready):
            heap.add(entry)

    def order(self, ready: Ready) -> tuple[float, ...]:
        """The least goes first; the builder has an order of its own."""
        return oldest(ready) if ready.role is Role.BUILDER else self.policy.order(ready)

    def discard(self, key: Hashable) -> None:
        """Forget a unit, if it is there."""
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
        """The unit that `worker` runs next, which is no longer ready then; None when nothing waits for it."""
        entry = self._choice(worker)
        if entry is None:
            return None
        self.discard(entry[2].key)
        if self.policy.drawn and entry[2].role is Role.DEVICE:
            self._drawn_until = max(self._drawn_until, entry[0][0])
        return entry[2]

    def peek(self, worker: WorkerView) -> Ready | None:
        """What `take` would give."""
        entry = self._choice(worker)
        return None if entry is None else entry[2]

    def _choice(self, worker: WorkerView) -> _Entry | None:
        best = self._first(self._pools, worker)
        if best is None or not self.policy.lazy or worker.role is Role.BUILDER:
            return best
        return self._spare_a_move(best, worker)

    def _spare_a_move(self, best: _Entry, worker: WorkerView) -> _Entry:
        """Instead of the best: the worker's own trial within the slack, else one at home within the move slack."""
        longest = _left(best[2])
        if worker.current is not None:
            own = [entry for entry in self._attempts.get(worker.current, {}).values() if can_run(entry[2], worker)]
            if own and _behind(longest, min(own)) <= self.policy.slack:
                return min(own)
        near = self._first(self._homes, worker)
        return near if near is not None and _behind(longest, near) <= self.policy.move_slack else best

    def _first(self, pools: dict[_Pool, _Heap], worker: WorkerView) -> _Entry | None:
        """The first in order of what is bound to the worker and of what may go anywhere."""
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
    """Whether `worker` may take the unit: the right kind of process, the right one where it is bound, else one with
    room."""
    return ready.role == worker.role and ready.worker in (None, worker.worker) and _has_room(ready, worker)


def _has_room(ready: Ready, worker: WorkerView) -> bool:
    """What is bound to a worker has its place there already."""
    return ready.memory is None or ready.worker is not None or worker.has_room(ready.attempt, ready.memory)


def _heap(pools: dict[_Pool, _Heap], pool: _Pool) -> _Heap:
    heap = pools.get(pool)
    if heap is None:
        heap = pools[pool] = _Heap()
    return heap


def _left(ready: Ready) -> float:
    return math.inf if ready.remaining is None else ready.remaining


def _behind(longest: float, entry: _Entry) -> float:
    """Seconds by which a unit's trial has less to go than the longest; none where neither is measured."""
    left = _left(entry[2])
    return 0.0 if left == longest else longest - left


def _mixed(value: int) -> int:
    """A 64-bit mix (splitmix64): near numbers become far ones."""
    value = (value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)
