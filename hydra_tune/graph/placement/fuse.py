"""Fuses nodes with their only consumers before placement, and splits them again for the schedule.

As in Baechi (arXiv 2301.08695) this keeps captured graphs small. A node is fused if that costs little: it is the only
producer of its only consumer, so they would wait for each other anyway, or sending its output would take at least as
long as running it. Branches worth a device of their own stay separate. No cycle can arise, since everything that leaves
a fused node leaves from its last part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydra_tune.graph.placement.problem import Problem
from hydra_tune.graph.placement.simulate import Schedule, simulate

SHARE = 0.25
"""Maximum share of the smallest device's memory for a fused node: large pieces are hard to pack."""


@dataclass(frozen=True)
class Fused:
    """A problem with fused nodes, and the mapping back."""

    problem: Problem
    original: Problem
    parts: tuple[tuple[int, ...], ...]
    """Original nodes of each fused node, in topological order."""

    def expanded(self, schedule: Schedule) -> Schedule:
        """Return the same placement for the original nodes, each starting as early as possible."""
        device = [0] * len(self.original.nodes)
        for fused, parts in enumerate(self.parts):
            for part in parts:
                device[part] = schedule.device[fused]
        sequence = [part for fused in schedule.sequence for part in self.parts[fused]]
        return simulate(self.original, device, sequence)


def fuse(problem: Problem) -> Fused:
    """Fuse all nodes for which it is worthwhile."""
    parts = _clusters(problem)
    number = {part: fused for fused, inside in enumerate(parts) for part in inside}
    before: list[dict[int, float]] = [{} for _ in parts]
    after: list[dict[int, float]] = [{} for _ in parts]
    for node, givers in enumerate(problem.before):
        for giver, seconds in givers:
            u, v = number[giver], number[node]
            if u != v:
                before[v][u] = after[u][v] = max(seconds, before[v].get(u, 0.0))
    made = replace(
        problem,
        nodes=tuple(problem.nodes[inside[-1]] for inside in parts),
        times=tuple(sum(problem.times[part] for part in inside) for inside in parts),
        before=tuple(tuple(sorted(givers.items())) for givers in before),
        after=tuple(tuple(sorted(takers.items())) for takers in after),
    )
    return Fused(_regrouped(made, problem, parts), problem, parts)


def _clusters(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Return the nodes of each fused node, sorted by their last parts, which is a topological order."""
    room = SHARE * min(problem.capacity)
    last = list(range(len(problem.nodes)))
    producers = [{giver for giver, _ in givers} for givers in problem.before]
    memory = [problem.memory[group] for group in problem.group]
    for node in reversed(last):
        takers = {last[taker] for taker, _ in problem.after[node]}
        if len(takers) != 1:
            continue
        taker = takers.pop()
        alone = producers[taker] == {node}
        slow = max(seconds for _, seconds in problem.after[node]) >= problem.times[node]
        together = problem.group[node] == problem.group[taker]
        apart = all(len(problem.members[problem.group[each]]) == 1 for each in (node, taker))
        fits = together or (apart and memory[taker] + memory[node] <= room)
        if (alone or slow) and fits:
            last[node] = taker
            producers[taker] = (producers[taker] - {node}) | producers[node]
            memory[taker] += 0 if together else memory[node]
    inside: dict[int, list[int]] = {}
    for node, end in enumerate(last):
        inside.setdefault(end, []).append(node)
    return tuple(tuple(inside[end]) for end in sorted(inside))


def _regrouped(made: Problem, problem: Problem, parts: Sequence[Sequence[int]]) -> Problem:
    """Return the problem with groups of fused nodes; groups that were fused become one."""
    leader = {problem.group[part]: problem.group[inside[-1]] for inside in parts for part in inside}
    number: dict[int, int] = {}
    group = [number.setdefault(leader[problem.group[inside[-1]]], len(number)) for inside in parts]
    of = {old: number[leader[old]] for old in leader}
    members: list[list[int]] = [[] for _ in number]
    memory: list[float] = [0 for _ in number]
    sent: list[dict[int, float]] = [{} for _ in number]
    received: list[dict[int, float]] = [{} for _ in number]
    for node, mine in enumerate(group):
        members[mine].append(node)
    for old, size in enumerate(problem.memory):
        memory[of[old]] += size
        for taker, count in problem.sent[old].items():
            u, v = of[old], of[taker]
            if u != v:
                sent[u][v] = received[v][u] = sent[u].get(v, 0) + count
    return replace(
        made, group=tuple(group), members=tuple(map(tuple, members)), memory=tuple(memory), sent=tuple(sent),
        received=tuple(received),
    )  # fmt: skip
