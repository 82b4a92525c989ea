"""Placements that ran into a dead end, made to fit: by moves and swaps of groups, then by exhaustive search.

Whether groups fit is bin packing, which is NP-hard. The search is depth first over the groups, the largest first, with
bounds; where it ends by itself its answer is exact, and it does for a dozen groups and for most larger instances. It
gives up after a number of steps. Then PlacementInfeasible says that nothing was found, not that nothing exists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hydra_tune.devices import format_bytes
from hydra_tune.errors import PlacementInfeasible, quoted
from hydra_tune.graph.placement.memory import NOWHERE, Room
from hydra_tune.graph.placement.problem import Problem
from hydra_tune.graph.placement.topo import fill_in_order

STEPS = 200_000
"""Of the exhaustive search: all placements of a dozen groups on two or three devices, about a second."""
SWAPS = 20_000
"""How many swaps are tried in one pass."""


def repair(problem: Problem, where: Sequence[int]) -> list[int]:
    """Groups on devices that can hold them, near to those given, where groups may be nowhere or too many.

    Raises PlacementInfeasible.
    """
    room = _mended(problem, where)
    if _overfull(room) > 0:
        # Neighbours in the graph on one device: where remote inputs take much, that leaves the most room.
        room = min(room, _mended(problem, fill_in_order(problem)), key=_overfull)
    if _overfull(room) <= 0:
        return room.where
    search = _Search(problem, 0, STEPS)
    if search.found is not None:
        return search.found
    raise _infeasible(problem, room, proven=search.complete)


def _mended(problem: Problem, where: Sequence[int]) -> Room:
    """All groups on devices, after as many moves and swaps as help."""
    room = Room.of(problem, where)
    missing = [group for group, device in enumerate(room.where) if device == NOWHERE]
    for group in sorted(missing, key=lambda group: -problem.memory[group]):
        room.put(group, min(problem.devices, key=lambda device: (_worst(room, group, device), device)))
    while _overfull(room) > 0 and (_move(room) or _swap(room)):
        pass
    return room


def _overfull(room: Room) -> float:
    """The bytes that all devices together are over their capacities."""
    return sum(-free for free in room.free if free < 0)


def _worst(room: Room, group: int, device: int) -> float:
    """The least free bytes of a device, negated, if the group went there."""
    return max(size - room.free[d] for d, size in room.takes(group, device).items())


def _move(room: Room) -> bool:
    """Move the group that frees most of what is overfull, of equals the smallest; whether there was one."""
    now, best = _overfull(room), None
    for group in range(len(room.where)):
        origin = room.where[group]
        if room.free[origin] >= 0 and not room.problem.sent[group]:
            continue
        room.take(group)
        for device in room.problem.devices:
            if device != origin:
                room.put(group, device)
                left = _overfull(room)
                if left < now and (best is None or (left, room.problem.memory[group]) < best[:2]):
                    best = (left, room.problem.memory[group], group, device)
                room.take(group)
        room.put(group, origin)
    if best is None:
        return False
    room.take(best[2])
    room.put(best[2], best[3])
    return True


def _swap(room: Room) -> bool:
    """Swap groups of overfull devices for others, wherever that leaves less overfull; whether there was such a swap."""
    before = now = _overfull(room)
    tries, linked, memory = SWAPS, any(room.problem.sent), room.problem.memory
    full = [group for group, device in enumerate(room.where) if room.free[device] < 0]
    for group in sorted(full, key=lambda group: -memory[group]):
        for other in range(len(room.where)):
            if now <= 0 or tries <= 0 or room.free[room.where[group]] >= 0:
                break
            if room.where[group] == room.where[other] or (not linked and memory[group] <= memory[other]):
                continue
            tries -= 1
            _exchange(room, group, other)
            left = _overfull(room)
            if left < now:
                now = left
                break
            _exchange(room, group, other)
    return now < before


def _exchange(room: Room, group: int, other: int) -> None:
    first, second = room.where[group], room.where[other]
    room.take(group)
    room.take(other)
    room.put(group, second)
    room.put(other, first)


class _Search:
    """A placement of all groups that no device exceeds by more than `excess` bytes, if there is one."""

    def __init__(self, problem: Problem, excess: float, steps: int) -> None:
        self.problem, self.steps = problem, steps
        self.found: list[int] | None = None
        self._room = Room(problem)
        self._room.free = [cap + excess for cap in problem.capacity]
        self._order = sorted(range(len(problem.members)), key=lambda group: -problem.memory[group])
        self._left = [0.0] * (len(self._order) + 1)
        for i in reversed(range(len(self._order))):
            self._left[i] = self._left[i + 1] + problem.memory[self._order[i]]
        self._linked = any(problem.sent)
        self._go()

    @property
    def complete(self) -> bool:
        """Whether nothing was left out."""
        return self.found is not None or self.steps > 0

    def _go(self) -> None:
        """Depth first with a stack of its own: graphs may have more groups than Python likes calls."""
        room, stack = self._room, [self._choices(0)]
        while stack and self.steps > 0:
            depth = len(stack) - 1
            if depth == len(self._order):
                self.found = list(room.where)
                return
            group = self._order[depth]
            if room.where[group] != NOWHERE:
                room.take(group)
            if not stack[-1]:
                stack.pop()
                continue
            self.steps -= 1
            room.put(group, stack[-1].pop())
            stack.append(self._choices(depth + 1))

    def _choices(self, depth: int) -> list[int]:
        """Devices for the next group, the best last: the fullest that it fits, so that large gaps stay."""
        if depth == len(self._order) or self._left[depth] > math.fsum(self._room.free):
            return []
        room, group = self._room, self._order[depth]
        seen: set[tuple[float, float | int]] = set()
        choices = []
        for device in sorted(self.problem.devices, key=lambda d: (-room.free[d], d)):
            # Devices with equal room are equal, unless what stands on them sends something to what comes.
            used = device if self._linked and device in room.where else -1
            alike = (room.free[device], used)
            if alike not in seen and room.fits(group, device):
                seen.add(alike)
                choices.append(device)
        return choices


def _infeasible(problem: Problem, room: Room, proven: bool) -> PlacementInfeasible:
    """The error, with the bytes that each device lacks."""
    lacking, exact = _least_excess(problem, room.excess)
    total, there = sum(problem.memory), sum(problem.capacity)
    largest = max(range(len(problem.memory)), key=lambda group: problem.memory[group])
    most = max(problem.capacity)
    if problem.memory[largest] > most:
        names = [problem.nodes[node] for node in problem.members[largest]]
        what = f"node {quoted(names[0])} takes" if len(names) == 1 else f"the group of node {quoted(names[0])} takes"
        message = f"{what} {format_bytes(problem.memory[largest])}, and the largest device has {format_bytes(most)}"
    elif total > there:
        message = f"all nodes take {format_bytes(total)}, and all devices have {format_bytes(there)}"
    elif proven:
        message = f"no placement of {len(problem.members)} groups of nodes fits {len(problem.capacity)} devices"
    else:
        message = f"found no placement of {len(problem.members)} groups of nodes, although there may be one"
    proven = proven or problem.memory[largest] > most or total > there
    about = "" if exact else "at most "
    return PlacementInfeasible(
        f"{message}: each device lacks {about}{format_bytes(lacking)}",
        "give the devices more memory, or take more devices",
        lacking_bytes=lacking,
        proven=proven,
    )


def _least_excess(problem: Problem, excess: float) -> tuple[float, bool]:
    """The least bytes by which some device is overfull however groups are placed, and whether that is sure."""
    least, exact = excess, True
    while least > 0:
        search = _Search(problem, least * (1 - 1e-9), STEPS // 10)  # that is, less than before
        if search.found is None:
            exact = search.complete
            break
        least = Room.of(problem, search.found).excess
    return least, exact
