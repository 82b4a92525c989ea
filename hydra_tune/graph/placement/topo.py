"""m-TOPO (Baechi, arXiv 2301.08695): fill one device after the other in topological order.

A device is full at its fair share of all memory plus the largest group, or at its capacity. The simplest placer, and
with scarce memory sometimes the best: neighbours in the graph stay together.
"""

from __future__ import annotations

from hydra_tune.graph.placement.memory import NOWHERE, Room
from hydra_tune.graph.placement.problem import Problem


def fill_in_order(problem: Problem) -> list[int]:
    """Return the device of each group, or NOWHERE for groups that fit no device."""
    room, device = Room(problem), 0
    share = sum(problem.memory) / len(problem.capacity) + max(problem.memory, default=0)
    taken = [0.0] * len(problem.capacity)
    for group in range(len(problem.members)):  # groups are numbered by their first node, so this is topological
        size = problem.memory[group]
        while device + 1 < len(taken) and (taken[device] + size > share or not room.fits(group, device)):
            device += 1
        # Small groups may still fit a device that a large one did not.
        chosen = next((d for d in (device, *problem.devices) if room.fits(group, d)), NOWHERE)
        if chosen != NOWHERE:
            room.put(group, chosen)
            taken[chosen] += size
    return room.where
