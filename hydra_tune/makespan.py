"""How long a search took against the least it could have taken with the same work on the same devices."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Makespan:
    """The work of a search on its devices, as it is done."""

    devices: int
    chains: bool = True
    """Whether a trial runs on one device at a time: then none ends sooner than its own work takes."""
    work: dict[int, float] = field(default_factory=dict)
    """Seconds on devices, by trial."""
    _first: float = float("inf")
    _last: float = 0.0

    def add(self, trial: int, started: float, seconds: float) -> None:
        """A unit of the trial ran on a device."""
        self.work[trial] = self.work.get(trial, 0.0) + seconds
        self._first = min(self._first, started)
        self._last = max(self._last, started + seconds)

    @property
    def seconds(self) -> float:
        """From the first unit to the last."""
        return max(0.0, self._last - self._first)

    @property
    def bound(self) -> float:
        """No schedule is shorter than the longest trial, nor than all work spread evenly."""
        longest = max(self.work.values(), default=0.0) if self.chains else 0.0
        return max(longest, sum(self.work.values()) / self.devices)

    def line(self) -> str:
        """For people; empty where nothing ran."""
        if not self.bound:
            return ""
        longest = self.chains and max(self.work.values()) >= sum(self.work.values()) / self.devices
        least = "the longest trial" if longest else f"all work spread over {self.devices} devices"
        ratio = self.seconds / self.bound
        return f"devices ran for {self.seconds:.1f} s, {ratio:.2f} of the least possible ({least}: {self.bound:.1f} s)"
