"""Memory used on each device by the groups placed so far, updated as groups are placed and removed.

A group uses its own bytes on its device, and those of inputs from other devices: every edge is a transfer of its own,
so an output used by two nodes of a device counts twice. A device keeps all of them until the step ends, since the
backward needs them again; so only the devices decide what fits, not the order.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydra_tune.graph.placement.problem import Problem

NOWHERE = -1


class Room:
    """The free bytes of every device, as the groups of a problem are placed."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.free = list(problem.capacity)
        self.where = [NOWHERE] * len(problem.members)
        """Device of each group."""

    @classmethod
    def of(cls, problem: Problem, where: Sequence[int]) -> Room:
        """Return the room with these groups placed."""
        room = cls(problem)
        for group, device in enumerate(where):
            if device != NOWHERE:
                room.put(group, device)
        return room

    @property
    def used(self) -> tuple[float, ...]:
        """Bytes used on each device, summed afresh to avoid rounding errors of removals."""
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
        """Bytes by which the fullest device exceeds its capacity."""
        return max(0, -min(self.free))

    def fits(self, group: int, device: int) -> bool:
        """True if the group fits the device without overfilling it, or another device the group sends to."""
        if not self.problem.limited:
            return True
        return all(self.free[d] >= size for d, size in self.takes(group, device).items())

    def takes(self, group: int, device: int) -> dict[int, float]:
        """Return the bytes that placing the group there would use, by device."""
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
        """Place the group there, even if that overfills a device."""
        for d, size in self.takes(group, device).items():
            self.free[d] -= size
        self.where[group] = device

    def take(self, group: int) -> None:
        """Remove the group from its device."""
        device = self.where[group]
        self.where[group] = NOWHERE
        for d, size in self.takes(group, device).items():
            self.free[d] += size
