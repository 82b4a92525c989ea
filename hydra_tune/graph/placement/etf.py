"""m-ETF (Baechi, arXiv 2301.08695): launch the ready node that can start earliest, on the device where it can.

Earliest task first is from Hwang, Chow, Anger and Lee (SIAM J. Comput. 18, 1989): without memory limits it takes at
most (2 - 1/devices) of the optimum plus the transfers of one chain. The same launcher serves m-SCT, which holds devices
back for favourite children, and finds an order for nodes whose devices are already decided.

A node cannot start before its producers end, so the smallest earliest start never decreases, and the launcher needs no
event queue. For each device it keeps nodes whose inputs have arrived apart from the others. Both can be heaps, because
arrivals and a device's free time never decrease.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from hydra_tune.graph.placement.memory import NOWHERE, Room
from hydra_tune.graph.placement.problem import Problem, bottom_levels
from hydra_tune.graph.placement.simulate import Clock, Schedule


class Start(NamedTuple):
    """The earliest start of a node on a device. Ties go to the lower rank."""

    time: float
    rank: float
    node: int


class Queue:
    """Nodes that may run on one device: those with all inputs, by rank, and the others, by arrival."""

    def __init__(self) -> None:
        self._there: list[tuple[float, int]] = []
        self._coming: list[Start] = []

    def add(self, arrival: float, rank: float, node: int) -> None:
        heappush(self._coming, Start(arrival, rank, node))

    def first(self, now: float, arrival: Callable[[int], float | None]) -> Start | None:
        """Return the earliest start from `now` on; nodes without an arrival are dropped, later ones queued again."""
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
    """Launches one node after the other; `stuck` if no ready node fits any device."""

    def __init__(self, problem: Problem, rank: Sequence[float], where: Sequence[int] | None = None) -> None:
        self.problem, self.rank = problem, rank
        self.room = Room(problem) if where is None else Room.of(problem, where)
        self.clock = Clock(problem)
        self.launched = [False] * len(problem.nodes)
        self.waits = [len(before) for before in problem.before]
        """Number of producers each node still waits for."""
        self._queues = [Queue() for _ in problem.devices]

    @property
    def stuck(self) -> bool:
        return len(self.clock.sequence) < len(self.problem.nodes)

    def launch_all(self) -> None:
        """Launch until all nodes are launched, or none fits."""
        for node, count in enumerate(self.waits):
            if not count:
                self.ready(node)
        while (choice := self.choose()) is not None:
            self.launch(*choice)

    def choose(self) -> tuple[int, int] | None:
        """Return the node and device with the earliest start; ties go to the lower rank, then the first device."""
        best: tuple[Start, int] | None = None
        for device in self.problem.devices:
            found = self.first(device)
            if found is not None and (best is None or found[:2] < best[0][:2]):
                best = found, device
        return None if best is None else (best[0].node, best[1])

    def first(self, device: int) -> Start | None:
        """Return the earliest start on this device."""
        return self._queues[device].first(self.clock.free[device], lambda node: self.arrival(node, device))

    def arrival(self, node: int, device: int) -> float | None:
        """Return the time when a ready node's inputs are on a device; None if it can no longer run there."""
        if self.launched[node] or not self.allowed(node, device):
            return None
        return self.clock.arrival(node, device)

    def allowed(self, node: int, device: int) -> bool:
        """True if the node may run there: its group is there, or is not placed yet and fits."""
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
        """Queue a node whose producers are all launched, so that the arrival of its inputs is known."""
        for device in self.problem.devices:
            at = self.arrival(node, device)
            if at is not None:
                self._queues[device].add(at, self.rank[node], node)


def earliest_first(problem: Problem, rank: Sequence[float] | None = None) -> Launcher:
    """Run m-ETF as far as it gets. Ties go to the lower rank, by default in topological order."""
    launcher = Launcher(problem, range(len(problem.nodes)) if rank is None else rank)
    launcher.launch_all()
    return launcher


def in_good_order(problem: Problem, where: Sequence[int]) -> Schedule:
    """Return a schedule for groups on given devices; ties go to the node with the longest path to the end."""
    levels = bottom_levels(problem, [where[group] for group in problem.group])
    launcher = Launcher(problem, [-level for level in levels], where)
    launcher.launch_all()
    return launcher.clock.schedule()
