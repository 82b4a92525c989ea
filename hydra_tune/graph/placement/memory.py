"""What the groups that are placed so far take on each device, kept up to date as groups come and go.

A group takes its own bytes on its device, and what it receives from groups on other devices: an edge is a transfer of
its own, so an output that two nodes of a device use counts twice there. A device holds all of it until the step ends,
since the backward needs it again; so only the devices decide what fits, not the order.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra_tune.graph.placement.problem import Problem

NOWHERE = -1


class Room:
    """The free bytes of every device, for groups of a problem that are placed one after the other."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.free = list(problem.capacity)
        self.where = [NOWHERE] * len(problem.members)
        """The device of each group."""

    @classmethod
    def of(cls, problem: Problem, where: Sequence[int]) -> Room:
        """With these groups placed."""
        room = cls(problem)
        for group, device in enumerate(where):
            if device != NOWHERE:
                room.put(group, device)
        return room

    @property
    def used(self) -> tuple[float, ...]:
        """What is taken on each device. Added up anew, so that removals leave no rounding behind."""
        problem = self.problem
        used: list[float] = [0] * len(self.free)
        for group, device in enumerate(self.where):
            if device != NOWHERE:
                used[device] += problem.memory[group]
                used[device] += sum(
                    size
                    for giver, size in problem.received[group].items()
                    if self.where[giver] not in (device, NOWHERE)
                )
        return tuple(used)

    @property
    def excess(self) -> float:
        """How far the fullest device is over its capacity."""
        return max(0, -min(self.free))

    def fits(self, group: int, device: int) -> bool:
        """Whether the group can go there without overfilling this device, or another one that it sends to."""
        if not self.problem.limited:
            return True
        return all(self.free[d] >= size for d, size in self.takes(group, device).items())

    def takes(self, group: int, device: int) -> dict[int, float]:
        """What it would take to have the group there, by device."""
        problem, where = self.problem, self.where
        takes = {device: problem.memory[group]}
        for giver, size in problem.received[group].items():
            if where[giver] not in (device, NOWHERE):
                takes[device] += size
        for taker, size in problem.sent[group].items():
            there = where[taker]
            if there not in (device, NOWHERE):
                takes[there] = takes.get(there, 0) + size
        return takes

    def put(self, group: int, device: int) -> None:
        """The group goes there, even where that overfills a device."""
        for d, size in self.takes(group, device).items():
            self.free[d] -= size
        self.where[group] = device

    def take(self, group: int) -> None:
        """The group is nowhere again."""
        device = self.where[group]
        self.where[group] = NOWHERE
        for d, size in self.takes(group, device).items():
            self.free[d] += size
