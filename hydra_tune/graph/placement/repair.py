"""Repairs placements that do not fit, by moves and swaps of groups, then by exhaustive search.

Whether groups fit is bin packing, which is NP-hard. The search is depth first over the groups, the largest first, with
bounds; if it completes, its answer is exact, as for a dozen groups and for most larger instances. It gives up after a
number of steps; PlacementInfeasible then says that nothing was found, not that nothing exists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hydra_tune.core.devices import format_bytes
from hydra_tune.core.errors import PlacementInfeasible, quoted
from hydra_tune.graph.placement.memory import NOWHERE, Room
from hydra_tune.graph.placement.problem import Problem
from hydra_tune.graph.placement.topo import fill_in_order

STEPS = 200_000
"""Steps of the exhaustive search: all placements of a dozen groups on two or three devices, about a second."""
SWAPS = 20_000
"""Maximum number of swaps tried in one pass."""


def repair(problem: Problem, where: Sequence[int]) -> list[int]:
    """Return devices that can hold all groups, close to those given, where groups may be unplaced or too many.

    Raises PlacementInfeasible.
    """
    room = _mended(problem, where)
    if _overfull(room) > 0:
        # Filling in order keeps neighbours on one device, which saves memory if remote inputs are large.
        room = min(room, _mended(problem, fill_in_order(problem)), key=_overfull)
    if _overfull(room) <= 0:
        return room.where
    search = _Search(problem, 0, STEPS)
    if search.found is not None:
        return search.found
    raise _infeasible(problem, room, proven=search.complete)


def _mended(problem: Problem, where: Sequence[int]) -> Room:
    """Place all groups, then move and swap while that helps."""
    room = Room.of(problem, where)
    missing = [group for group, device in enumerate(room.where) if device == NOWHERE]
    for group in sorted(missing, key=lambda group: -problem.memory[group]):
        room.put(group, min(problem.devices, key=lambda device: (_worst(room, group, device), device)))
    while _overfull(room) > 0 and (_move(room) or _swap(room)):
        pass
    return room


def _overfull(room: Room) -> float:
    """Return the bytes by which all devices together exceed their capacities."""
    return sum(-free for free in room.free if free < 0)


def _worst(room: Room, group: int, device: int) -> float:
    """Return the largest excess in bytes over any device's free memory if the group went there."""
    return max(size - room.free[d] for d, size in room.takes(group, device).items())


def _move(room: Room) -> bool:
    """Move the group that reduces the excess most, ties to the smallest; True if there was one."""
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
    """Swap groups of overfull devices with others while that reduces the excess; True if any swap did."""
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
    """Searches for a placement of all groups that exceeds no device by more than `excess` bytes."""

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
        """True if the search was exhaustive or found a placement."""
        return self.found is not None or self.steps > 0

    def _go(self) -> None:
        """Search depth first with an explicit stack, since there may be more groups than Python's recursion limit."""
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
        """Return devices for the next group, the best last: the fullest that it fits, so that large gaps remain."""
        if depth == len(self._order) or self._left[depth] > math.fsum(self._room.free):
            return []
        room, group = self._room, self._order[depth]
        seen: set[tuple[float, float | int]] = set()
        choices = []
        for device in sorted(self.problem.devices, key=lambda d: (-room.free[d], d)):
            # Devices with equal room are interchangeable, unless groups on them exchange data with groups to come.
            used = device if self._linked and device in room.where else -1
            alike = (room.free[device], used)
            if alike not in seen and room.fits(group, device):
                seen.add(alike)
                choices.append(device)
        return choices


def _infeasible(problem: Problem, room: Room, proven: bool) -> PlacementInfeasible:
    """Return the error, with the bytes that a device lacks."""
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
    """Return the least excess in bytes over any placement, and True if that is exact."""
    least, exact = excess, True
    while least > 0:
        search = _Search(problem, least * (1 - 1e-9), STEPS // 10)  # strictly less than before
        if search.found is None:
            exact = search.complete
            break
        least = Room.of(problem, search.found).excess
    return least, exact
