"""Chooses the node of a trial. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LARGER = 1.1
"""Factor from which a node counts as larger: free memory differs a little between any two looks."""


@dataclass(frozen=True)
class Size:
    """Room of a node, in bytes."""

    device: int = 0
    """Memory of its largest device."""
    devices: int = 0
    """Memory of all its devices."""
    host: int = 0
    """Host memory for trials."""

    def holds_more_than(self, other: Size) -> bool:
        """True if a trial that does not fit the other node may fit this one."""
        pairs = (self.device, other.device), (self.devices, other.devices), (self.host, other.host)
        return any(ours > LARGER * theirs for ours, theirs in pairs)


@dataclass(frozen=True)
class Place:
    """A node that takes trials, as the choice sees it."""

    name: str
    size: Size
    at_once: int
    """Trials that keep its devices busy."""
    running: int


def choose(places: Iterable[Place], larger_than: Size | None = None) -> str | None:
    """Return the least loaded node with room for one more trial; None if there is none now.

    A trial that was too large for a node is offered to larger ones only.
    """
    fits = [
        place
        for place in places
        if place.running < place.at_once and (larger_than is None or place.size.holds_more_than(larger_than))
    ]
    if not fits:
        return None
    # Of equally loaded ones the roomiest, then by name, so that the choice does not depend on who joined first.
    return min(fits, key=lambda each: (each.running / each.at_once, -each.size.devices, each.name)).name


def rivals(running: int, at_once: int, to_come: int, share: float) -> int:
    """Return how many trials want a node's devices: those running, and its share of those to come."""
    coming = -(-to_come * share // 1) if to_come else 0
    return max(1, min(max(at_once, running), running + int(coming)))
