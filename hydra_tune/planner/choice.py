"""Chooses a trial's strategy: a pure function of estimates, the pool and the number of competing trials.

A strategy that takes `seconds` on devices of its own, and `work` in all, takes max(seconds, work x rivals / devices) if
`rivals` trials share the devices evenly. So while trials outnumber devices the least work wins, which is `whole` for
every candidate that fits; when trials run out, a strategy that uses the idle devices wins. A strategy with more moving
parts has to be faster by a margin, and an approximate one by a larger margin, since it costs accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra_tune.core.devices import format_bytes
from hydra_tune.strategies.estimate import Estimate
from hydra_tune.strategies.pool import Pool
from hydra_tune.strategies.registry import BUILT_IN, known

EXACT = tuple(name for name, kind in BUILT_IN.items() if kind.exact)
APPROXIMATE = tuple(name for name, kind in BUILT_IN.items() if not kind.exact)
MARGIN = 1.1
"""Factor by which a strategy must be faster than one that precedes it in the registry."""
APPROXIMATE_MARGIN = 1.25
ENOUGH = 4
"""Trials for each device that must be left for trials to be trained as one."""


@dataclass(frozen=True)
class Situation:
    """Input of the choice besides the candidate."""

    pool: Pool
    rivals: int
    """Trials that want devices while this one trains, including itself."""
    epochs: float
    """Epochs left."""
    left: int = 0
    """Trials of the search that have not ended, including those to come."""
    setup: Mapping[str, float] = field(default_factory=dict)
    """Seconds that a strategy takes to begin; 0 for the current one."""


@dataclass(frozen=True)
class Choice:
    """A strategy with its reason, and the estimates of the others."""

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
        """Predicted seconds for all epochs, on otherwise idle devices."""
        return self.setup_seconds + self.epochs * self.estimate.seconds

    def stored(self) -> dict[str, Any]:
        """Return the choice as plain data for the trial's record, without unmeasured values."""
        document: dict[str, Any] = {
            "strategy": self.strategy,
            "because": self.because,
            "predicted_device_bytes": self.estimate.device_bytes // self.estimate.members,
            "options": [self._option(option) for option in self.options],
        }
        if math.isfinite(self.estimate.seconds):
            document["predicted_seconds"] = self.seconds
            document["predicted_batch_ms"] = 1000 * self.estimate.batch_seconds
        return document

    def _option(self, option: Estimate) -> dict[str, Any]:
        return {
            "strategy": option.strategy, "refused": option.refused, "parts": option.parts,
            "seconds": None if option.refused else self.epochs * _of_one(option),
            "members": option.members, "device_bytes": option.device_bytes,
            "host_bytes": option.host_bytes, "disk_bytes": option.disk_bytes,
            "communicated_bytes": round(self.epochs * option.moved_bytes),
        }  # fmt: skip


def _of_one(option: Estimate) -> float:
    """Return the seconds of an epoch, or of a trial's share if it trains as one with others."""
    return option.work if option.members > 1 else option.seconds


def choose(estimates: Sequence[Estimate], situation: Situation) -> Choice | None:
    """Return the strategy that finishes the trial soonest in this situation; None if all are refused."""
    possible = sorted((e for e in estimates if not e.refused), key=_place)
    if not possible:
        return None
    best = possible[0]
    for other in possible[1:]:
        margin = MARGIN if known()[other.strategy].exact else APPROXIMATE_MARGIN
        if margin * until_done(other, situation) < until_done(best, situation):
            best = other
    setup = situation.setup.get(best.strategy, 0.0)
    return Choice(best, _because(best, estimates, situation), tuple(estimates), situation.epochs, setup)


def until_done(estimate: Estimate, situation: Situation) -> float:
    """Return the seconds until the trial ends by that strategy, sharing the pool with its rivals.

    A trial that trains as one with others counts its share of their time, if there are enough trials for that.
    """
    if estimate.members > 1:
        if situation.left < ENOUGH * situation.pool.devices:
            return math.inf
        share = max(estimate.work, estimate.work * situation.rivals / situation.pool.devices)
        return situation.setup.get(estimate.strategy, 0.0) + situation.epochs * share
    shared = estimate.work * situation.rivals / situation.pool.devices
    return situation.setup.get(estimate.strategy, 0.0) + situation.epochs * max(estimate.seconds, shared)


def _place(estimate: Estimate) -> int:
    return list(known()).index(estimate.strategy)


def _because(best: Estimate, estimates: Sequence[Estimate], situation: Situation) -> str:
    """Return the reason in one line for people."""
    pool, rivals = situation.pool, situation.rivals
    others = {estimate.strategy: estimate for estimate in estimates if estimate is not best}
    cannot = others.get("whole")
    if best.members > 1:
        return f"up to {best.members} trials of its shape train as one, which is {_gain(best, cannot)} per trial"
    if best.strategy == "whole":
        fits = f"it takes {format_bytes(best.device_bytes)} of a device's {format_bytes(pool.memory)}"
        if pool.devices == 1:
            return fits
        if rivals >= pool.devices:
            return f"{fits}, and {rivals} trials keep {pool.devices} devices busy"
        return f"{fits}, and no other strategy is faster by a tenth"
    lacking = f"not whole ({cannot.refused}); " if cannot is not None and cannot.refused else ""
    kind = known()[best.strategy]
    if kind.last_resort:
        return f"{lacking}{best.parts} {kind.parts} take turns" if lacking else "faster than the others"
    idle = max(0, pool.devices - rivals)
    exact = [each for each in estimates if known()[each.strategy].exact and not each.refused and each is not best]
    times = _times(best, exact, situation)
    spare = f"{idle} of {pool.devices} devices would be idle: " if idle else ""
    return f"{lacking}{spare}{best.parts} parts on {best.devices} devices are {times}"


def _gain(best: Estimate, whole: Estimate | None) -> str:
    if whole is None or whole.refused:
        return "the only way"
    return f"{whole.work / max(best.work, 1e-9):.1f} times as quick"


def _times(best: Estimate, others: Sequence[Estimate], situation: Situation) -> str:
    if not others:
        return "the only possibility"
    next_best = min(until_done(other, situation) for other in others)
    ratio = next_best / max(until_done(best, situation), 1e-9)
    return f"{ratio:.1f} times as fast" if math.isfinite(ratio) else "the only possibility"
