"""Computes the start of every node, given its device and one sequence of all nodes.

Each device runs its nodes in sequence, one at a time, each as soon as its inputs have arrived. An input from another
device arrives after its transfer time, counted from the end of its producer. With parallel transfers that is all. With
sequential ones each device has one channel for sending and receiving; a transfer occupies the channels of both ends,
and transfers go in the order of their consumers in the sequence. This common order also keeps devices with blocking
sends and receives from deadlocking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hydra_tune.graph.placement.problem import Problem


class Transfer(NamedTuple):
    """The transfer of an output from the device of `giver` to that of `taker`."""

    giver: int
    taker: int
    start: float
    stop: float


@dataclass(frozen=True)
class Schedule:
    """The times of a placement. Nodes are numbers of the problem."""

    device: tuple[int, ...]
    sequence: tuple[int, ...]
    start: tuple[float, ...]
    makespan: float


class Clock:
    """The times of devices and channels while nodes are added to a schedule one by one."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.free = [0.0] * len(problem.capacity)
        """Time when each device has finished its nodes."""
        self.device = [-1] * len(problem.nodes)
        self.start = [0.0] * len(problem.nodes)
        self.stop = [0.0] * len(problem.nodes)
        self.sequence: list[int] = []
        self._channels = [0.0] * len(problem.capacity)

    def arrival(self, node: int, device: int) -> float:
        """Return the time when the node's last input would arrive. Its producers have been run."""
        if self.problem.sequential:
            return max((t.stop for t in self.transfers(node, device)), default=0.0)
        latest = 0.0
        for giver, seconds in self.problem.before[node]:
            there = self.stop[giver] if self.device[giver] == device else self.stop[giver] + seconds
            if there > latest:
                latest = there
        return latest

    def transfers(self, node: int, device: int) -> list[Transfer]:
        """Return the transfers of the node's inputs, one after the other; local inputs take no time."""
        inputs = sorted((self.stop[giver], giver, seconds) for giver, seconds in self.problem.before[node])
        channels = list(self._channels)
        found = []
        for ready, giver, seconds in inputs:
            start, origin = ready, self.device[giver]
            if origin == device:
                seconds = 0.0
            elif self.problem.sequential:
                start = max(ready, channels[origin], channels[device])
                channels[origin] = channels[device] = start + seconds
            found.append(Transfer(giver, node, start, start + seconds))
        return found

    def run(self, node: int, device: int) -> None:
        """Run the node next on this device."""
        start = self.free[device]
        if self.problem.sequential:
            for transfer in self.transfers(node, device):
                start = max(start, transfer.stop)
                origin = self.device[transfer.giver]
                if origin != device:
                    self._channels[origin] = self._channels[device] = transfer.stop
        else:
            start = max(start, self.arrival(node, device))
        self.device[node], self.start[node] = device, start
        self.stop[node] = self.free[device] = start + self.problem.times[node]
        self.sequence.append(node)

    def schedule(self) -> Schedule:
        """Return the schedule of the nodes run so far."""
        return Schedule(tuple(self.device), tuple(self.sequence), tuple(self.start), max(self.stop, default=0.0))


def simulate(problem: Problem, device: Sequence[int], sequence: Sequence[int]) -> Schedule:
    """Return the schedule of nodes on these devices in this sequence, which has every node after its producers."""
    clock = Clock(problem)
    for node in sequence:
        clock.run(node, device[node])
    return clock.schedule()


def transfers(problem: Problem, schedule: Schedule) -> list[Transfer]:
    """Return all transfers between devices of a schedule, in order."""
    clock = Clock(problem)
    found = []
    for node in schedule.sequence:
        device = schedule.device[node]
        found += [t for t in clock.transfers(node, device) if clock.device[t.giver] != device]
        clock.run(node, device)
    return found
