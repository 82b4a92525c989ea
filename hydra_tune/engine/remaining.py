"""How much work a trial has left, as a scheduler should count it: what it would take, times the chance that it comes to
that.

A pruner ends most trials early. Counted in full, a trial that is about to be pruned would go first under
longest-remaining-first and keep devices from those that will last. `Survival` learns from the study's own reports how
likely a trial is to go on after each epoch.
"""

from __future__ import annotations

import math
from collections import Counter

PRIOR_SURVIVAL = 0.9
"""Where a study has a pruner and nothing is known: pruners spare most trials at most reports."""
PRIOR_REPORTS = 10.0
"""How many reports that belief is worth, for the study as a whole."""
EPOCH_REPORTS = 4.0
"""How many reports of one epoch the study's average is worth: rungs differ much from the epochs between them."""


class Survival:
    """How likely a trial goes on after its report of each epoch, from what this study has seen."""

    def __init__(self, *, pruner: bool) -> None:
        self.pruner = pruner
        self._reports: Counter[int] = Counter()
        self._pruned: Counter[int] = Counter()

    def reported(self, epoch: int) -> None:
        """A trial reported at the end of `epoch`, whatever came of it."""
        self._reports[epoch] += 1

    def pruned(self, epoch: int) -> None:
        """That report ended the trial."""
        self._pruned[epoch] += 1

    def probability(self, epoch: int) -> float:
        """The chance to go on after the report of `epoch`; 1 where nothing prunes."""
        if not self.pruner:
            return 1.0
        survived = self._reports.total() - self._pruned.total()
        usual = (survived + PRIOR_REPORTS * PRIOR_SURVIVAL) / (self._reports.total() + PRIOR_REPORTS)
        here = self._reports[epoch] - self._pruned[epoch]
        return (here + EPOCH_REPORTS * usual) / (self._reports[epoch] + EPOCH_REPORTS)


def expected_remaining(seconds_per_epoch: float, epoch: float, epochs: int, survival: Survival) -> float:
    """Expected seconds that a trial still takes after `epoch` epochs, 2.5 being in the middle of the third.

    The running epoch counts to its end; each later one counts as often as a trial survives the reports before it.
    """
    if epoch >= epochs:
        return 0.0
    running = math.floor(epoch)
    seconds = (running + 1 - epoch) * seconds_per_epoch
    chance = 1.0
    for report in range(running, epochs - 1):
        chance *= survival.probability(report)
        seconds += chance * seconds_per_epoch
    return seconds
