"""Decides if a trial whose attempt has failed gets another attempt.

Within an attempt, lost work is repeated by the rule of `strategies/recovery.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hydra_tune.core.states import Status


@dataclass(frozen=True)
class Failed:
    """A failed attempt."""

    status: Status
    progressed: bool = False
    """True if the attempt got further than the previous one: past a build, or to a new checkpoint."""


@dataclass(frozen=True)
class RetryPolicy:
    """A retry budget for each kind of failure, used up only by attempts without progress.

    User code that raises, diverges or does not fit would do so again: a trial is deterministic. A process that was
    killed or hung is retried, without limit while each attempt gets further, as in a long training on a machine that is
    sometimes short of memory.
    """

    budgets: Mapping[Status, int] = field(
        default_factory=lambda: {
            Status.FAILED: 0,
            Status.DIVERGED: 0,
            Status.OUT_OF_MEMORY: 0,
            Status.LOST: 1,
            Status.HUNG: 1,
        }
    )

    def again(self, history: Sequence[Failed]) -> bool:
        """True if the trial should be retried after these failures, the latest last."""
        last = history[-1]
        budget = self.budgets[last.status]
        stuck = 0
        for failed in reversed(history):
            if failed.progressed:
                break
            stuck += failed.status is last.status
        return budget > 0 and stuck <= budget
