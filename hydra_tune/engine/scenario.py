"""What the simulator is asked: trials, devices, a policy, what units and moves cost; and what it answers."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

from hydra_tune.engine.scheduler import FOR_WHOLE_TRIALS
from hydra_tune.errors import SpecError, nearest, quoted


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is simulated. Sizes are in bytes, times in seconds."""

    trials: int = 64
    devices: int = 8
    policy: str = "lazy-lrtf"
    shards: int = 4
    batches: int = 10
    unit_seconds: float = 1.0
    """A forward of one shard, in the mean over trials."""
    spread: float = 0.5
    """How much trials differ: the standard deviation of the logarithm of their unit seconds."""
    backward: float = 2.0
    """A backward's cost in forwards."""
    state_bytes: int = 0
    """Of each shard; 0 for moves that cost nothing."""
    device_memory: int | None = None
    """Of each device; None for enough."""
    bandwidth: int = 4 * 2**30
    """Bytes a second that a device brings in or writes."""
    double_buffering: bool = True
    seed: int = 0
    slack: float | None = None
    """Of a lazy policy; by default twenty mean units."""

    def __post_init__(self) -> None:
        if self.policy not in FOR_WHOLE_TRIALS:
            raise SpecError(f"policy cannot be {quoted(self.policy)}", nearest(self.policy, FOR_WHOLE_TRIALS))
        for name in ("trials", "devices", "shards", "batches", "bandwidth"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} cannot be {getattr(self, name)}", "give a whole number of at least 1")
        if not 0 < self.unit_seconds < math.inf:
            raise SpecError(f"unit_seconds cannot be {self.unit_seconds}", "give seconds, more than 0")
        if not 0 <= self.spread <= 5:
            raise SpecError(f"spread cannot be {self.spread}", "give a number from 0, all trials alike, to 5")
        if self.slack is not None and not self.slack >= 0:
            raise SpecError(f"slack cannot be {self.slack}", "give seconds, 0 or more")
        if not 0 <= self.seed < 2**32:
            raise SpecError(f"seed cannot be {self.seed}", "give a number from 0 to below 2**32")
        self._check_memory()

    def _check_memory(self) -> None:
        if self.state_bytes < 0:
            raise SpecError(f"state_bytes cannot be {self.state_bytes}", "give a size, 0 or more")
        held = 2 if self.double_buffering else 1
        if self.device_memory is not None and self.device_memory < held * self.state_bytes:
            what = "two shards, one running and one coming in" if held == 2 else "a shard"
            raise SpecError(
                f"device_memory cannot be {self.device_memory} bytes where a shard has {self.state_bytes}",
                f"give at least {held * self.state_bytes}, for {what}",
            )

    def forward_seconds(self) -> list[float]:
        """Of a unit of each trial: lognormal with the mean asked for, from the seed."""
        draw = random.Random(self.seed)
        shift = -(self.spread**2) / 2
        return [self.unit_seconds * draw.lognormvariate(shift, self.spread) for _ in range(self.trials)]


class Chain:
    """The units of one batch, as in Hydra (arXiv 2107.06469): which shard each is for, and its cost in forwards.

    The forwards of all shards but the last, one forward-backward of the last, the backwards of the others.
    """

    def __init__(self, shards: int, backward: float) -> None:
        last = shards - 1
        self.shards = [*range(last), last, *reversed(range(last))]
        self.costs = [1.0] * last + [1.0 + backward] + [backward] * last
        self.done = [0.0, *itertools.accumulate(self.costs)]
        """The cost of all units before each."""
        self.first_backward = last

    def __len__(self) -> int:
        return len(self.costs)

    @property
    def total(self) -> float:
        return self.done[-1]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a scenario, in virtual seconds."""

    units: int
    makespan: float
    lower_bound: float
    """No schedule is shorter: the longest trial, or all work shared out evenly. Moves are not in it."""
    makespan_vs_bound: float
    utilization: float
    """The share of the devices' time in which they compute."""
    same_model_residency: float
    """The share of units whose device ran the same trial just before."""
    switches: int
    """Units whose device ran another trial just before."""
    moved_bytes: int
    peak_device_bytes: int


@dataclass(frozen=True, slots=True)
class Ran:
    """One unit of a simulation."""

    trial: int
    number: int
    """Its place among the trial's units."""
    device: int
    given: float
    """When the device took it; between this and `begins` its shard came in."""
    begins: float
    ends: float
