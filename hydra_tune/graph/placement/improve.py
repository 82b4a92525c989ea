"""Local search for a shorter placement, which `best` adds to the best of the three placers.

The placers are greedy. Here a schedule is changed at its critical chain, the nodes that delay each other from the first
start to the last end, because only such changes can shorten it. A node of the chain moves to another device, alone or
with its neighbour in the chain; its group and another one swap devices; or it moves before another node of its device.
The first change that shortens the schedule is kept, until there is none or the work budget is used up. The result is
never worse than the input, but may be a local optimum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from hydra_tune.graph.placement.memory import Room
from hydra_tune.graph.placement.problem import Problem, bottom_levels
from hydra_tune.graph.placement.simulate import Schedule, simulate

WORK = 500_000
"""Budget in nodes and edges over all tried schedules: about a tenth of a second, more with sequential channels."""
MOVE = 20
"""Work charged for checking the memory of a change."""
LESS = 1 - 1e-9
"""Factor below which a schedule counts as shorter, to ignore rounding."""


class Search:
    """Shortens schedules of one problem, with one work budget for all of them."""

    def __init__(self, problem: Problem, work: int = WORK) -> None:
        self.problem, self.work = problem, work
        self._cost = 2 * len(problem.nodes) + sum(map(len, problem.before))

    def improve(self, schedule: Schedule) -> Schedule:
        """Improve a schedule until no single change shortens it, or the budget is used up."""
        while (shorter := self._shorter(schedule)) is not None:
            schedule = shorter
        return schedule

    def _shorter(self, schedule: Schedule) -> Schedule | None:
        """Return the first change that shortens the schedule, or None."""
        for device, sequence in self._changes(schedule):
            if self.work < self._cost:
                return None
            self.work -= self._cost
            found = simulate(self.problem, device, sequence)
            if found.makespan < schedule.makespan * LESS:
                return found
        return None

    def _changes(self, schedule: Schedule) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """Yield the devices and sequences one change away."""
        chain = critical_chain(self.problem, schedule)
        for device in self._moves(schedule, chain):
            yield device, schedule.sequence
            yield device, by_bottom_level(self.problem, device)
        yield schedule.device, by_bottom_level(self.problem, schedule.device)
        for sequence in self._reorderings(schedule, chain):
            yield schedule.device, sequence

    def _moves(self, schedule: Schedule, chain: Sequence[int]) -> Iterator[list[int]]:
        """Yield other devices for groups of the chain: one group, two neighbours, or a swap with any other group."""
        problem = self.problem
        room = Room.of(problem, [schedule.device[members[0]] for members in problem.members])
        groups = list(dict.fromkeys(problem.group[node] for node in chain))
        neighbours = [(a, b) for a, b in pairwise(groups) if room.where[a] == room.where[b]]
        for moving in [*((group,) for group in groups), *neighbours]:
            for device in problem.devices:
                if device != room.where[moving[0]]:
                    yield from self._moved(room, dict.fromkeys(moving, device))
        for group in groups:
            for other in range(len(problem.members)):
                here, there = room.where[group], room.where[other]
                if self.work <= 0:
                    return
                if here != there:
                    yield from self._moved(room, {group: there, other: here})

    def _moved(self, room: Room, moves: dict[int, int]) -> Iterator[list[int]]:
        """Yield the devices of all nodes after the moves, if memory allows them."""
        self.work -= MOVE
        before = {group: room.where[group] for group in moves}
        for group in moves:
            room.take(group)
        for group, device in moves.items():
            room.put(group, device)
        if min(room.free) >= 0:
            yield [room.where[group] for group in self.problem.group]
        for group in moves:
            room.take(group)
        for group, device in before.items():
            room.put(group, device)

    def _reorderings(self, schedule: Schedule, chain: Sequence[int]) -> Iterator[list[int]]:
        """Yield sequences in which a chain node, with its producers, precedes an earlier node of its device."""
        for node in chain:
            needed = {node}
            later: list[int] = []
            earlier: list[int] = []
            before = list(schedule.sequence[: schedule.sequence.index(node)])
            after = schedule.sequence[len(before) + 1 :]
            while before:
                other = before.pop()
                if any(taker in needed for taker, _ in self.problem.after[other]):
                    needed.add(other)
                    earlier.append(other)
                    if schedule.device[other] == schedule.device[node]:
                        break
                    continue
                later.append(other)
                if schedule.device[other] == schedule.device[node]:
                    yield [*before, *reversed(earlier), node, *reversed(later), *after]


def critical_chain(problem: Problem, schedule: Schedule) -> list[int]:
    """Return nodes from the last to end back to one that starts at once, each delayed by the next."""
    stop = [start + seconds for start, seconds in zip(schedule.start, problem.times, strict=True)]
    previous: dict[int, int] = {}
    latest: dict[int, int] = {}
    for node in schedule.sequence:
        device = schedule.device[node]
        if device in latest:
            previous[node] = latest[device]
        latest[device] = node
    chain = [max(range(len(stop)), key=lambda node: stop[node])] if stop else []
    while chain and schedule.start[chain[-1]] > 0:
        node = chain[-1]
        holding = [(stop[previous[node]], previous[node])] if node in previous else []
        for giver, seconds in problem.before[node]:
            away = schedule.device[giver] != schedule.device[node]
            holding.append((stop[giver] + (seconds if away else 0.0), giver))
        chain.append(max(holding)[1])
    return chain


def by_bottom_level(problem: Problem, device: Sequence[int]) -> list[int]:
    """Return all nodes, the longest path to the end first, which is a topological order."""
    levels = bottom_levels(problem, device)
    return sorted(range(len(levels)), key=lambda node: (-levels[node], node))
