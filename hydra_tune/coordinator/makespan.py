"""Makespan of a search relative to the shortest possible with the same work on the same devices."""

from __future__ import annotations

from dataclasses import dataclass, field

SAME_MOMENT = 0.001
"""Seconds by which the clocks of two units may differ."""


@dataclass
class Makespan:
    """Work of a search on its devices."""

    devices: int
    work: dict[int, float] = field(default_factory=dict)
    """Seconds on devices, by trial."""
    spread: set[int] = field(default_factory=set)
    """Trials that used several devices at the same time; any other takes at least as long as its own work."""
    _ends: dict[int, float] = field(default_factory=dict)
    _first: float = float("inf")
    _last: float = 0.0

    def add(self, trial: int, started: float, seconds: float) -> None:
        """Add a unit of the trial that ran on a device."""
        self.work[trial] = self.work.get(trial, 0.0) + seconds
        ended = self._ends.get(trial, 0.0)
        if started < ended - SAME_MOMENT:
            self.spread.add(trial)
        self._ends[trial] = max(ended, started + seconds)
        self._first = min(self._first, started)
        self._last = max(self._last, started + seconds)

    @property
    def seconds(self) -> float:
        """Seconds from the first unit's start to the last unit's end."""
        return max(0.0, self._last - self._first)

    @property
    def bound(self) -> float:
        """Lower bound in seconds: the longest trial, or all work spread evenly."""
        return max(self.longest, sum(self.work.values()) / self.devices)

    @property
    def longest(self) -> float:
        """Seconds of work of the longest trial that used one device at a time."""
        return max((seconds for trial, seconds in self.work.items() if trial not in self.spread), default=0.0)

    def line(self) -> str:
        """Return a line for people; empty if nothing ran."""
        if not self.work or not self.bound:
            return ""
        longest = self.longest >= sum(self.work.values()) / self.devices
        least = "the longest trial" if longest else f"all work spread over {self.devices} devices"
        ratio = self.seconds / self.bound
        return f"devices ran for {self.seconds:.1f} s, {ratio:.2f} of the least possible ({least}: {self.bound:.1f} s)"
