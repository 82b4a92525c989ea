"""Expected remaining work of a trial: its remaining seconds weighted by the chance of surviving the pruner.

A pruner ends most trials early. Counted in full, a trial that is about to be pruned would go first under
longest-remaining-first and keep devices from trials that will last. `Survival` learns from the study's own reports how
likely a trial is to continue after each epoch, and how much likelier for the best third than for the worst.
"""

from __future__ import annotations

import bisect
import math
from array import array
from collections import Counter

PRIOR_SURVIVAL = 0.9
"""Prior survival probability per report in a study with a pruner: pruners spare most trials at most reports."""
PRIOR_REPORTS = 10.0
"""Weight of `PRIOR_SURVIVAL`, in reports."""
EPOCH_REPORTS = 4.0
"""Weight of the study's average for one epoch, in reports: rungs differ much from the epochs between them."""
THIRD_REPORTS = 4.0
"""Weight of the study's average for one third, in reports."""
FEW = 6
"""Fewest values of an epoch with which a trial's third is meaningful."""


class Survival:
    """Estimates the probability that a trial continues after each epoch's report, from this study's history."""

    def __init__(self, *, pruner: bool, maximize: bool = False) -> None:
        self.pruner = pruner
        self._sign = -1.0 if maximize else 1.0
        self._values: dict[int, array[float]] = {}
        """Sorted values of each epoch, best first."""
        self._reports: Counter[int] = Counter()
        self._pruned: Counter[int] = Counter()
        self._reports_of: Counter[int] = Counter()
        self._pruned_of: Counter[int] = Counter()

    def place(self, epoch: int, value: float) -> int | None:
        """Add a value and return its third among the epoch's values, 0 for the best; None if there are too few."""
        if not self.pruner:
            return None
        values, found = self._values.setdefault(epoch, array("d")), self._sign * value
        bisect.insort(values, found)
        return 3 * bisect.bisect_left(values, found) // len(values) if len(values) >= FEW else None

    def reported(self, epoch: int, third: int | None = None, *, pruned: bool = False) -> None:
        """Record a trial's report at the end of `epoch`, pruned or not; `third` is its place by the previous report."""
        self._reports[epoch] += 1
        self._pruned[epoch] += pruned
        if third is not None:
            self._reports_of[third] += 1
            self._pruned_of[third] += pruned

    def probability(self, epoch: int, third: int | None = None) -> float:
        """Return the probability to continue after the report of `epoch`, for a trial of that third."""
        if not self.pruner:
            return 1.0
        usual = _share(self._reports.total(), self._pruned.total(), PRIOR_SURVIVAL, PRIOR_REPORTS)
        here = _share(self._reports[epoch], self._pruned[epoch], usual, EPOCH_REPORTS)
        if third is None:
            return here
        there = _share(self._reports_of[third], self._pruned_of[third], usual, THIRD_REPORTS)
        # Epoch and third both shift the odds of the study's average.
        odds = _odds(here) * _odds(there) / _odds(usual)
        return odds / (1 + odds)


def _share(reports: int, pruned: int, belief: float, worth: float) -> float:
    """Return the share of trials that continue, with a prior `belief` worth `worth` reports."""
    return (reports - pruned + worth * belief) / (reports + worth)


def _odds(chance: float) -> float:
    return chance / (1 - chance)


def expected_remaining(
    seconds_per_epoch: float, epoch: float, epochs: int, survival: Survival, third: int | None = None
) -> float:
    """Return the expected seconds that a trial still takes after `epoch` epochs (2.5: amid the third epoch).

    The running epoch counts in full to its end; each later one is weighted by the chance to survive the reports before
    it. `third` is the trial's place by its last report.
    """
    if epoch >= epochs:
        return 0.0
    running = math.floor(epoch)
    seconds = (running + 1 - epoch) * seconds_per_epoch
    chance = 1.0
    for report in range(running, epochs - 1):
        chance *= survival.probability(report, third)
        seconds += chance * seconds_per_epoch
    return seconds
