"""The graph to place, checked and numbered, so that the placers can be short and fast.

Nodes become numbers in topological order, close to the order in which they were given. Nodes to be kept together form
one group; any other node is a group of its own. Groups are placed on devices; nodes are run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from hydra_tune.core.errors import SpecError, nearest, quoted

Node: TypeAlias = Hashable
Edge: TypeAlias = tuple[Node, Node]
CHANNELS = ("parallel", "sequential")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A graph with costs, and the devices. Nodes, groups and devices are numbers from 0."""

    nodes: tuple[Node, ...]
    """The caller's names in topological order; a node's number is its index here."""
    times: tuple[float, ...]
    before: tuple[tuple[tuple[int, float], ...], ...]
    """For each node, its producers and the seconds of each transfer between devices."""
    after: tuple[tuple[tuple[int, float], ...], ...]
    group: tuple[int, ...]
    """Group of each node."""
    members: tuple[tuple[int, ...], ...]
    """Nodes of each group."""
    memory: tuple[float, ...]
    """Bytes of each group on its device."""
    sent: tuple[Mapping[int, float], ...]
    """For each group, the bytes it sends to others; they count on the receiving device."""
    received: tuple[Mapping[int, float], ...]
    capacity: tuple[float, ...]
    """Bytes of each device; infinite without a limit."""
    sequential: bool
    """True if each device has one channel, which does one transfer at a time."""

    @property
    def devices(self) -> range:
        return range(len(self.capacity))

    @property
    def limited(self) -> bool:
        """True if any device has limited memory."""
        return min(self.capacity) < math.inf

    @property
    def alike(self) -> bool:
        """True if all devices have the same memory."""
        return len(set(self.capacity)) == 1


def read_problem(
    times: Mapping[Node, float],
    memory: Mapping[Node, float],
    edges: Mapping[Edge, float],
    *,
    devices: int,
    capacity: float | Sequence[float] | None = None,
    channel: str = "parallel",
    edge_bytes: Mapping[Edge, float] | None = None,
    groups: Iterable[Collection[Node]] = (),
) -> Problem:
    """Check the caller's input and return it as a Problem. Raises SpecError, naming the value and a remedy."""
    if channel not in CHANNELS:
        raise SpecError(f"there is no channel {quoted(channel)}", nearest(str(channel), CHANNELS))
    caps = _capacity(devices, capacity)
    sizes = edge_bytes or {}
    groups = [list(group) for group in groups]
    _check_nodes(times, memory)
    _check_edges(times, edges, sizes, groups)
    order = _topological(times, edges)
    number = {node: i for i, node in enumerate(order)}
    before: list[list[tuple[int, float]]] = [[] for _ in order]
    after: list[list[tuple[int, float]]] = [[] for _ in order]
    for (u, v), seconds in sorted(edges.items(), key=lambda item: (number[item[0][0]], number[item[0][1]])):
        before[number[v]].append((number[u], seconds))
        after[number[u]].append((number[v], seconds))
    group = _groups(len(order), [[number[node] for node in wish] for wish in groups])
    members: list[list[int]] = [[] for _ in range(max(group, default=-1) + 1)]
    for node, of in enumerate(group):
        members[of].append(node)
    sent: list[dict[int, float]] = [{} for _ in members]
    received: list[dict[int, float]] = [{} for _ in members]
    for (u, v), size in sizes.items():
        giver, taker = group[number[u]], group[number[v]]
        if giver != taker and size:
            sent[giver][taker] = received[taker][giver] = sent[giver].get(taker, 0) + size
    return Problem(
        nodes=tuple(order), times=tuple(times[node] for node in order), before=tuple(map(tuple, before)),
        after=tuple(map(tuple, after)), group=tuple(group), members=tuple(map(tuple, members)),
        memory=tuple(sum(memory[order[i]] for i in inside) for inside in members), sent=tuple(sent),
        received=tuple(received), capacity=caps, sequential=channel == "sequential",
    )  # fmt: skip


def bottom_levels(problem: Problem, device: Sequence[int] | None = None) -> list[float]:
    """Return the least seconds from the start of each node to the end.

    Transfers count between different devices; without `device` all of them count.
    """
    levels = [0.0] * len(problem.nodes)
    for node in reversed(range(len(levels))):
        longest = 0.0
        for other, seconds in problem.after[node]:
            way = levels[other]
            if device is None or device[node] != device[other]:
                way += seconds
            longest = max(longest, way)
        levels[node] = longest + problem.times[node]
    return levels


def _capacity(devices: int, capacity: float | Sequence[float] | None) -> tuple[float, ...]:
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise SpecError(f"devices cannot be {quoted(devices)}", "give how many there are, 1 or more")
    if capacity is None:
        return (math.inf,) * devices
    caps = tuple(capacity) if isinstance(capacity, Sequence) else (capacity,) * devices
    if len(caps) != devices:
        raise SpecError(
            f"capacity names {len(caps)} devices and there are {devices}", "give one number, or one for each device"
        )
    for cap in caps:
        if not cap >= 0:
            raise SpecError(f"capacity cannot be {quoted(cap)}", "give bytes, 0 or more, or None for no limit")
    return caps


def _check_nodes(times: Mapping[Node, float], memory: Mapping[Node, float]) -> None:
    for what, numbers in (("times", times), ("memory", memory)):
        for node, value in numbers.items():
            if not 0 <= value < math.inf:
                raise SpecError(f"{what} of node {quoted(node)} cannot be {quoted(value)}", "give 0 or more")
    for what, other, numbers in (("memory", times, memory), ("times", memory, times)):
        for node in other:
            if node not in numbers:
                raise SpecError(f"{what} lacks node {quoted(node)}", "times and memory have the same nodes")


def _check_edges(
    times: Mapping[Node, float],
    edges: Mapping[Edge, float],
    sizes: Mapping[Edge, float],
    groups: Iterable[Collection[Node]],
) -> None:
    for edge, seconds in edges.items():
        for node in edge:
            if node not in times:
                raise SpecError(
                    f"edge {quoted(edge)} has an unknown node {quoted(node)}", "name it in times, or go without"
                )
        if not 0 <= seconds < math.inf:
            raise SpecError(f"edge {quoted(edge)} cannot take {quoted(seconds)}", "give 0 or more")
    for edge, size in sizes.items():
        if edge not in edges:
            raise SpecError(f"edge_bytes has an unknown edge {quoted(edge)}", "name it in edges, or go without")
        if not 0 <= size < math.inf:
            raise SpecError(f"edge_bytes of {quoted(edge)} cannot be {quoted(size)}", "give 0 or more")
    for group in groups:
        for node in group:
            if node not in times:
                raise SpecError(f"a group has an unknown node {quoted(node)}", "name it in times, or go without")


def _topological(times: Mapping[Node, float], edges: Mapping[Edge, float]) -> list[Node]:
    """Sort the nodes so that each comes after its producers, otherwise in the given order."""
    place = {node: i for i, node in enumerate(times)}
    names = list(times)
    waits = dict.fromkeys(times, 0)
    after: dict[Node, list[Node]] = {node: [] for node in times}
    for u, v in edges:
        waits[v] += 1
        after[u].append(v)
    ready = [place[node] for node, count in waits.items() if not count]
    heapify(ready)
    order = []
    while ready:
        node = names[heappop(ready)]
        order.append(node)
        for other in after[node]:
            waits[other] -= 1
            if not waits[other]:
                heappush(ready, place[other])
    if len(order) < len(names):
        circle = _circle({node for node, count in waits.items() if count}, edges)
        raise SpecError(
            f"the graph has a circle: {' → '.join(quoted(node, 30) for node in circle)}", "take one of its edges out"
        )
    return order


def _circle(left: set[Node], edges: Mapping[Edge, float]) -> list[Node]:
    """Return one cycle among nodes that all wait for each other, shortened in the middle if long."""
    waits_for = {v: u for u, v in edges if u in left and v in left}
    way = [next(node for node in waits_for)]
    seen = {way[0]: 0}
    while (node := waits_for[way[-1]]) not in seen:
        seen[node] = len(way)
        way.append(node)
    circle = [*way[seen[node] :], node][::-1]
    return circle if len(circle) <= 6 else [*circle[:3], "…", *circle[-2:]]


def _groups(count: int, wishes: Iterable[Sequence[int]]) -> list[int]:
    """Return the group of each node. Groups that share a node are merged; groups are numbered by their first node."""
    leader = list(range(count))

    def find(node: int) -> int:
        while leader[node] != node:
            leader[node] = node = leader[leader[node]]
        return node

    for wish in wishes:
        for node in wish[1:]:
            first, second = sorted((find(wish[0]), find(node)))
            leader[second] = first
    number: dict[int, int] = {}
    return [number.setdefault(find(node), len(number)) for node in range(count)]
