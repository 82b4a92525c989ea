"""Random small graphs, and the shortest makespan of all their placements, by branch and bound.

Tests and the placement benchmark judge the placers by it. It shares no code with them, so as to be independent.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Instance:
    """Input of `place`, with nodes numbered in topological order. Transfers are parallel."""

    times: Mapping[int, int]
    memory: Mapping[int, int]
    edges: Mapping[tuple[int, int], int]
    devices: int
    capacity: int | None = None
    edge_bytes: Mapping[tuple[int, int], int] = field(default_factory=dict)
    groups: tuple[frozenset[int], ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `place`."""
        return {
            "devices": self.devices, "capacity": self.capacity, "edge_bytes": self.edge_bytes, "groups": self.groups,
        }  # fmt: skip

    @property
    def small_transfers(self) -> bool:
        """True if no transfer takes longer than any node."""
        return max(self.edges.values(), default=0) <= min(self.times.values())


def random_instance(seed: int, most: int = 8) -> Instance:
    """Return a graph of up to `most` nodes; small or large transfers, with or without caps, groups, remote inputs."""
    rng = random.Random(seed)
    count, devices = rng.randint(3, most), rng.choice([2, 3])
    small, capped = rng.random() < 0.5, rng.random() < 0.5
    times = {node: rng.randint(4, 20) for node in range(count)}
    density = rng.choice([0.2, 0.35, 0.5])
    longest = min(times.values()) if small else 30
    edges = {
        (u, v): rng.randint(0, longest) for v in range(count) for u in range(v) if rng.random() < density
    }  # fmt: skip
    memory = {node: rng.randint(1, 10) for node in range(count)}
    edge_bytes = {edge: rng.randint(0, 3) for edge in edges} if capped and rng.random() < 0.3 else {}
    groups: tuple[frozenset[int], ...] = ()
    if rng.random() < 0.2:
        groups = (frozenset(rng.sample(range(count), 2)),)
    capacity = None
    if capped:
        capacity = math.ceil(sum(memory.values()) / devices * rng.uniform(1.0, 1.6))
    return Instance(
        times=times, memory=memory, edges=edges, devices=devices,
        capacity=capacity, edge_bytes=edge_bytes, groups=groups,
    )  # fmt: skip


def optimal_makespan(instance: Instance, upper: float = math.inf) -> float | None:
    """Return the shortest makespan of all placements, or `upper` if none is shorter; None if no placement fits.

    Nodes are added to a schedule in the order of their starts, each as early as its device and inputs allow: every
    left-justified schedule is found once.
    """
    if not math.isfinite(upper) and not _fits_somehow(instance):
        return None
    return _Search(instance, upper).best


def _fits_somehow(instance: Instance) -> bool:
    search = _Search(instance, math.inf, run=False)

    def go(node: int) -> bool:
        if node == len(instance.times):
            return True
        for device in range(instance.devices):
            if search.put(node, device):
                if go(node + 1):
                    return True
                search.remove(node)
        return False

    return go(0)


class _Search:
    def __init__(self, instance: Instance, upper: float, run: bool = True) -> None:
        self.instance, self.best = instance, upper
        count = len(instance.times)
        self.before = [[(u, c, instance.edge_bytes.get((u, v), 0)) for (u, v), c in instance.edges.items() if v == node]
                       for node in range(count)]  # fmt: skip
        self.after = [[(v, instance.edge_bytes.get((u, v), 0)) for u, v in instance.edges if u == node]
                      for node in range(count)]  # fmt: skip
        self.level = [0] * count  # longest path to the end without transfers
        for node in reversed(range(count)):
            self.level[node] = instance.times[node] + max((self.level[v] for v, _ in self.after[node]), default=0)
        self.mates = [{m for group in instance.groups if node in group for m in group} for node in range(count)]
        self.device = [-1] * count
        self.stop = [0] * count
        self.free = [0] * instance.devices
        self.room = [math.inf if instance.capacity is None else instance.capacity] * instance.devices
        if run:
            self.extend((0, -1), sum(instance.times.values()))

    def extend(self, last: tuple[int, int], work: int) -> None:
        """Try every node that could start next, not before `last`, on every device."""
        if not work:
            self.best = min(self.best, max(self.stop))
            return
        if self.hopeless(last[0], work):
            return
        for node, where in enumerate(self.device):
            if where >= 0 or any(self.device[u] < 0 for u, _, _ in self.before[node]):
                continue
            for device in range(self.instance.devices):
                if device and not any(self.free[device - 1 :]):
                    break  # all unused devices are equivalent
                start = self.free[device]
                for u, seconds, _ in self.before[node]:
                    start = max(start, self.stop[u] + (seconds if self.device[u] != device else 0))
                if (start, node) <= last or start + self.level[node] >= self.best or not self.put(node, device):
                    continue
                free, seconds = self.free[device], self.instance.times[node]
                self.stop[node] = self.free[device] = start + seconds
                self.extend((start, node), work - seconds)
                self.free[device] = free
                self.remove(node)

    def hopeless(self, now: int, work: int) -> bool:
        """True if the remaining work, or some node's longest path to the end, cannot beat the best schedule."""
        if sum(max(free, now) for free in self.free) + work >= self.best * self.instance.devices:
            return True
        for node, where in enumerate(self.device):
            if where < 0:
                begin = max((self.stop[u] for u, _, _ in self.before[node] if self.device[u] >= 0), default=0)
                if max(begin, now) + self.level[node] >= self.best:
                    return True
        return False

    def put(self, node: int, device: int) -> bool:
        """Place the node, unless memory or its group forbids it."""
        if any(self.device[mate] not in (-1, device) for mate in self.mates[node]):
            return False
        self.charge(node, device, 1)
        self.device[node] = device
        if min(self.room) < 0:
            self.remove(node)
            return False
        return True

    def remove(self, node: int) -> None:
        device, self.device[node] = self.device[node], -1
        self.charge(node, device, -1)

    def charge(self, node: int, device: int, sign: int) -> None:
        self.room[device] -= sign * self.instance.memory[node]
        for u, _, size in self.before[node]:
            if self.device[u] not in (-1, device):
                self.room[device] -= sign * size
        for v, size in self.after[node]:
            if self.device[v] not in (-1, device):
                self.room[self.device[v]] -= sign * size
