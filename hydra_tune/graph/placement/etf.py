"""m-ETF (Baechi, arXiv 2301.08695): of all that is ready, launch what can start earliest, where it can start earliest.

Earliest task first is from Hwang, Chow, Anger and Lee (SIAM J. Comput. 18, 1989): without memory limits it takes at
most (2 - 1/devices) of the optimum plus the transfers of one chain. The same launcher serves m-SCT, which holds devices
back for favourite children, and finds an order for nodes whose devices are already decided.

A node's earliest start cannot come before its producers end, so the smallest earliest start never decreases, and the
launcher needs no event queue. For each device it keeps nodes whose inputs are there apart from those whose inputs are
still coming. Both can be heaps, because neither an arrival nor a device's free time ever goes back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from hydra_tune.graph.placement.memory import NOWHERE, Room
from hydra_tune.graph.placement.problem import Problem, bottom_levels
from hydra_tune.graph.placement.simulate import Clock, Schedule


class Start(NamedTuple):
    """When a node can start on some device. Of two that start together the lower rank goes first."""

    time: float
    rank: float
    node: int


class Queue:
    """Nodes that may run on one device: those whose inputs are there, by rank, and the others, by arrival."""

    def __init__(self) -> None:
        self._there: list[tuple[float, int]] = []
        self._coming: list[Start] = []

    def add(self, arrival: float, rank: float, node: int) -> None:
        heappush(self._coming, Start(arrival, rank, node))

    def first(self, now: float, arrival: Callable[[int], float | None]) -> Start | None:
        """What can start first from `now` on. What has no arrival any more is dropped, what arrives later put back."""
        there, coming = self._there, self._coming
        while there or coming:
            while coming and coming[0].time <= now:
                _, rank, node = heappop(coming)
                heappush(there, (rank, node))
            found = Start(now, *there[0]) if there else coming[0]
            at = arrival(found.node)
            if at is not None and at <= found.time:
                return found
            heappop(there) if there else heappop(coming)
            if at is not None:  # a channel that was free has become busy
                self.add(at, found.rank, found.node)
        return None


class Launcher:
    """Launches one node after the other. Stops early where nothing that is ready fits anywhere: `stuck`."""

    def __init__(self, problem: Problem, rank: Sequence[float], where: Sequence[int] | None = None) -> None:
        self.problem, self.rank = problem, rank
        self.room = Room(problem) if where is None else Room.of(problem, where)
        self.clock = Clock(problem)
        self.launched = [False] * len(problem.nodes)
        self.waits = [len(before) for before in problem.before]
        """For how many producers each node still waits."""
        self._queues = [Queue() for _ in problem.devices]

    @property
    def stuck(self) -> bool:
        return len(self.clock.sequence) < len(self.problem.nodes)

    def launch_all(self) -> None:
        """Until all nodes are launched, or it is stuck."""
        for node, count in enumerate(self.waits):
            if not count:
                self.ready(node)
        while (choice := self.choose()) is not None:
            self.launch(*choice)

    def choose(self) -> tuple[int, int] | None:
        """The node and device with the smallest earliest start, then the first by rank, then the first device."""
        best: tuple[Start, int] | None = None
        for device in self.problem.devices:
            found = self.first(device)
            if found is not None and (best is None or found[:2] < best[0][:2]):
                best = found, device
        return None if best is None else (best[0].node, best[1])

    def first(self, device: int) -> Start | None:
        """What can start first on this device."""
        return self._queues[device].first(self.clock.free[device], lambda node: self.arrival(node, device))

    def arrival(self, node: int, device: int) -> float | None:
        """When the inputs of a node that is ready are there; None where it cannot run there any more."""
        if self.launched[node] or not self.allowed(node, device):
            return None
        return self.clock.arrival(node, device)

    def allowed(self, node: int, device: int) -> bool:
        """Whether the node may run there: its group is there, or is nowhere yet and fits."""
        group = self.problem.group[node]
        there = self.room.where[group]
        return there == device if there != NOWHERE else self.room.fits(group, device)

    def launch(self, node: int, device: int) -> None:
        """Run the node next on this device."""
        self.clock.run(node, device)
        self.launched[node] = True
        group = self.problem.group[node]
        if self.room.where[group] == NOWHERE:
            self.room.put(group, device)
        for other, _ in self.problem.after[node]:
            self.waits[other] -= 1
            if not self.waits[other]:
                self.ready(other)

    def ready(self, node: int) -> None:
        """All producers of the node are launched, so it is known when its inputs come."""
        for device in self.problem.devices:
            at = self.arrival(node, device)
            if at is not None:
                self._queues[device].add(at, self.rank[node], node)


def earliest_first(problem: Problem, rank: Sequence[float] | None = None) -> Launcher:
    """m-ETF, as far as it gets. Of nodes that can start together the lower rank goes first; else topological order."""
    launcher = Launcher(problem, range(len(problem.nodes)) if rank is None else rank)
    launcher.launch_all()
    return launcher


def in_good_order(problem: Problem, where: Sequence[int]) -> Schedule:
    """A schedule for groups on given devices: of what can start earliest, what has the longest way to the end first."""
    levels = bottom_levels(problem, [where[group] for group in problem.group])
    launcher = Launcher(problem, [-level for level in levels], where)
    launcher.launch_all()
    return launcher.clock.schedule()
