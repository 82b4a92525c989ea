"""Input and output of the simulator: trials, devices, a policy, costs of units and moves, and the outcome."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

from hydra_tune.core.errors import SpecError, nearest, quoted
from hydra_tune.engine.scheduler import FOR_WHOLE_TRIALS


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Settings of a simulation. Sizes are in bytes, times in seconds."""

    trials: int = 64
    devices: int = 8
    concurrency: int | None = None
    """Trials in flight; by default one more than devices, as in a search by `shard`."""
    policy: str = "lazy-lrtf"
    units: int = 60
    """Mean number of units per trial."""
    unit_seconds: float = 1.0
    """Longest unit in seconds."""
    spread: float = 0.5
    """Variation of trial lengths: the standard deviation of their logarithm."""
    state_bytes: int = 0
    """Bytes of state per trial; 0 makes moves free."""
    device_memory: int | None = None
    """Bytes per device; None for unlimited."""
    bandwidth: int = 4 * 2**30
    """Bytes per second that a device reads or writes."""
    seed: int = 0
    slack: float | None = None
    """Slack of a lazy policy in seconds; by default the engine's."""

    def __post_init__(self) -> None:
        if self.policy not in FOR_WHOLE_TRIALS:
            raise SpecError(f"policy cannot be {quoted(self.policy)}", nearest(self.policy, FOR_WHOLE_TRIALS))
        for name in ("trials", "devices", "concurrency", "units", "bandwidth"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise SpecError(f"{name} cannot be {getattr(self, name)}", "give a whole number of at least 1")
        if not 0 < self.unit_seconds < math.inf:
            raise SpecError(f"unit_seconds cannot be {self.unit_seconds}", "give seconds, more than 0")
        if not 0 <= self.spread <= 5:
            raise SpecError(f"spread cannot be {self.spread}", "give a number from 0, all trials alike, to 5")
        if self.slack is not None and not self.slack >= 0:
            raise SpecError(f"slack cannot be {self.slack}", "give seconds, 0 or more")
        if not 0 <= self.seed < 2**32:
            raise SpecError(f"seed cannot be {self.seed}", "give a number from 0 to below 2**32")
        if self.device_memory is not None and self.device_memory < self.state_bytes:
            raise SpecError(
                f"device_memory cannot be {self.device_memory} bytes where a trial has {self.state_bytes}",
                f"give at least {self.state_bytes}",
            )

    def lengths(self) -> list[tuple[int, float]]:
        """Return each trial's number of units and seconds per unit: lognormal lengths, in as few units as allowed."""
        draw = random.Random(self.seed)
        whole = [self.units * draw.lognormvariate(-(self.spread**2) / 2, self.spread) for _ in range(self.trials)]
        return [(count := max(1, math.ceil(units)), self.unit_seconds * units / count) for units in whole]


@dataclass(frozen=True, kw_only=True)
class ScenarioOutcome:
    """Result of a simulation, in virtual seconds."""

    units: int
    makespan: float
    lower_bound: float
    """Lower bound of any schedule: the longest trial, or all work shared evenly. Excludes moves."""
    makespan_vs_bound: float
    utilization: float
    """Share of the devices' time spent computing."""
    same_model_residency: float
    """Share of units whose device ran the same trial just before."""
    switches: int
    """Number of units whose device ran another trial just before."""
    moved_bytes: int


class Ran(NamedTuple):
    """One unit of a simulation."""

    trial: int
    number: int
    """Index among the trial's units."""
    device: int
    given: float
    """Time at which the device took the unit; the trial's state is loaded between this and `begins`."""
    begins: float
    ends: float
