"""How much work a trial has left, as a scheduler should count it: what it would take, times the chance that it comes to
that.

A pruner ends most trials early. Counted in full, a trial that is about to be pruned would go first under
longest-remaining-first and keep devices from those that will last. `Survival` learns from the study's own reports how
likely a trial is to go on after each epoch, and how much likelier one of the best third is than one of the worst.
"""

from __future__ import annotations

import bisect
import math
from array import array
from collections import Counter

PRIOR_SURVIVAL = 0.9
"""Where a study has a pruner and nothing is known: pruners spare most trials at most reports."""
PRIOR_REPORTS = 10.0
"""How many reports that belief is worth, for the study as a whole."""
EPOCH_REPORTS = 4.0
"""How many reports of one epoch the study's average is worth: rungs differ much from the epochs between them."""
THIRD_REPORTS = 4.0
"""How many reports of one third the study's average is worth."""
FEW = 6
"""Values of one epoch, below which a place among them says nothing."""


class Survival:
    """How likely a trial goes on after its report of each epoch, from what this study has seen."""

    def __init__(self, *, pruner: bool, maximize: bool = False) -> None:
        self.pruner = pruner
        self._sign = -1.0 if maximize else 1.0
        self._values: dict[int, array[float]] = {}
        """Of each epoch, the best first."""
        self._reports: Counter[int] = Counter()
        self._pruned: Counter[int] = Counter()
        self._reports_of: Counter[int] = Counter()
        self._pruned_of: Counter[int] = Counter()

    def place(self, epoch: int, value: float) -> int | None:
        """The third of all values of an epoch that a new one is in, 0 for the best; None while they are few."""
        if not self.pruner:
            return None
        values, found = self._values.setdefault(epoch, array("d")), self._sign * value
        bisect.insort(values, found)
        return 3 * bisect.bisect_left(values, found) // len(values) if len(values) >= FEW else None

    def reported(self, epoch: int, third: int | None = None, *, pruned: bool = False) -> None:
        """A trial reported at the end of `epoch`, and was pruned or not; `third` is its place by the report before."""
        self._reports[epoch] += 1
        self._pruned[epoch] += pruned
        if third is not None:
            self._reports_of[third] += 1
            self._pruned_of[third] += pruned

    def probability(self, epoch: int, third: int | None = None) -> float:
        """The chance to go on after the report of `epoch`, for a trial of that third; 1 where nothing prunes."""
        if not self.pruner:
            return 1.0
        usual = _share(self._reports.total(), self._pruned.total(), PRIOR_SURVIVAL, PRIOR_REPORTS)
        here = _share(self._reports[epoch], self._pruned[epoch], usual, EPOCH_REPORTS)
        if third is None:
            return here
        there = _share(self._reports_of[third], self._pruned_of[third], usual, THIRD_REPORTS)
        # The epoch moves the odds of the study's average, and so does the third.
        odds = _odds(here) * _odds(there) / _odds(usual)
        return odds / (1 + odds)


def _share(reports: int, pruned: int, belief: float, worth: float) -> float:
    """The share that goes on, where a belief counts as so many reports."""
    return (reports - pruned + worth * belief) / (reports + worth)


def _odds(chance: float) -> float:
    return chance / (1 - chance)


def expected_remaining(
    seconds_per_epoch: float, epoch: float, epochs: int, survival: Survival, third: int | None = None
) -> float:
    """Expected seconds that a trial still takes after `epoch` epochs, 2.5 being in the middle of the third.

    The running epoch counts to its end; each later one counts as often as a trial survives the reports before it.
    `third` is where the trial stands by its last report.
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
