"""Which strategy a trial gets: a pure function of estimates, the pool and how many trials want it.

A strategy that takes `seconds` on devices of its own, and `work` in all, takes max(seconds, work x rivals / devices)
where `rivals` trials share the devices evenly. So while trials outnumber devices the least work wins, which is `whole`
for whatever fits; when they run out, whoever spreads over the idle devices does. A strategy with more moving parts has
to be quicker by a margin, and an approximate one by a larger margin, since it pays in accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra_tune.devices import format_bytes
from hydra_tune.planning.estimates import Estimate
from hydra_tune.planning.pool import Pool

EXACT = ("whole", "shard", "pipeline")
"""From the one with the fewest moving parts on."""
APPROXIMATE = ("sparse", "ist", "elastic")
MARGIN = 1.1
"""Times by which a strategy must be quicker than one that stands before it."""
APPROXIMATE_MARGIN = 1.25


@dataclass(frozen=True)
class Situation:
    """What the choice depends on besides the candidate."""

    pool: Pool
    rivals: int
    """Trials that want devices while this one is trained, itself included."""
    epochs: float
    """That are left."""
    setup: Mapping[str, float] = field(default_factory=dict)
    """Seconds that a strategy takes to begin; nothing for the one that trains already."""


@dataclass(frozen=True)
class Choice:
    """A strategy with the reason for it, and what the others would have taken."""

    estimate: Estimate
    because: str
    options: tuple[Estimate, ...]
    epochs: float
    setup_seconds: float = 0.0

    @property
    def strategy(self) -> str:
        return self.estimate.strategy

    @property
    def seconds(self) -> float:
        """Predicted for all epochs, on devices that nobody else uses."""
        return self.setup_seconds + self.epochs * self.estimate.seconds

    def stored(self) -> dict[str, Any]:
        """As it is kept with the trial; what was not measured is not there."""
        document: dict[str, Any] = {
            "strategy": self.strategy,
            "because": self.because,
            "predicted_device_bytes": self.estimate.device_bytes,
            "options": [self._option(option) for option in self.options],
        }
        if math.isfinite(self.estimate.seconds):
            document["predicted_seconds"] = self.seconds
            document["predicted_batch_ms"] = 1000 * self.estimate.batch_seconds
        return document

    def _option(self, option: Estimate) -> dict[str, Any]:
        return {
            "strategy": option.strategy, "refused": option.refused, "parts": option.parts,
            "seconds": None if option.refused else self.epochs * option.seconds,
            "device_bytes": option.device_bytes, "host_bytes": option.host_bytes, "disk_bytes": option.disk_bytes,
            "communicated_bytes": round(self.epochs * option.moved_bytes),
        }  # fmt: skip


def choose(estimates: Sequence[Estimate], situation: Situation) -> Choice | None:
    """The strategy that ends the trial soonest in this situation; None where all are refused."""
    possible = sorted((e for e in estimates if not e.refused), key=_place)
    if not possible:
        return None
    best = possible[0]
    for other in possible[1:]:
        margin = APPROXIMATE_MARGIN if other.strategy in APPROXIMATE else MARGIN
        if margin * until_done(other, situation) < until_done(best, situation):
            best = other
    setup = situation.setup.get(best.strategy, 0.0)
    return Choice(best, _because(best, estimates, situation), tuple(estimates), situation.epochs, setup)


def until_done(estimate: Estimate, situation: Situation) -> float:
    """Seconds until the trial ends by that strategy, sharing the pool with its rivals."""
    shared = estimate.work * situation.rivals / situation.pool.devices
    return situation.setup.get(estimate.strategy, 0.0) + situation.epochs * max(estimate.seconds, shared)


def _place(estimate: Estimate) -> int:
    return (*EXACT, *APPROXIMATE).index(estimate.strategy)


def _because(best: Estimate, estimates: Sequence[Estimate], situation: Situation) -> str:
    """One line for people."""
    pool, rivals = situation.pool, situation.rivals
    others = {estimate.strategy: estimate for estimate in estimates if estimate is not best}
    cannot = others.get("whole")
    if best.strategy == "whole":
        fits = f"it takes {format_bytes(best.device_bytes)} of a device's {format_bytes(pool.memory)}"
        if pool.devices == 1:
            return fits
        if rivals >= pool.devices:
            return f"{fits}, and {rivals} trials keep {pool.devices} devices busy"
        return f"{fits}, and no other way is quicker by a tenth"
    lacking = f"whole, it {cannot.refused}; " if cannot is not None and cannot.refused else ""
    if best.strategy == "shard":
        return f"{lacking}{best.parts} shards of it take turns" if lacking else "quicker than the others"
    idle = max(0, pool.devices - rivals)
    times = _times(best, [e for e in estimates if e.strategy in EXACT and not e.refused and e is not best], situation)
    spare = f"{idle} of {pool.devices} devices would be idle: " if idle else ""
    return f"{lacking}{spare}{best.parts} parts of it on {best.devices} devices are {times}"


def _times(best: Estimate, others: Sequence[Estimate], situation: Situation) -> str:
    if not others:
        return "the only way"
    next_best = min(until_done(other, situation) for other in others)
    ratio = next_best / max(until_done(best, situation), 1e-9)
    return f"{ratio:.1f} times as quick" if math.isfinite(ratio) else "the only way"
