"""Whether a trial that failed is tried again: one small policy, apart from everything that carries it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hydra_tune.states import Status


@dataclass(frozen=True)
class Failed:
    """How an attempt failed."""

    status: Status
    progressed: bool = False
    """Whether it got further than the attempt before it: past a build, or to a new checkpoint."""


@dataclass(frozen=True)
class RetryPolicy:
    """Each kind of failure has its own budget of tries that get no further.

    User code that raises, diverges or does not fit would do so again: a trial is deterministic. A process that was
    killed or hung is worth another try, and as many as it takes while each gets further, as in a long training on a
    machine that is short of memory now and then.
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
        """Whether to try again after these failures, the last of which has just happened."""
        last = history[-1]
        budget = self.budgets[last.status]
        stuck = 0
        for failed in reversed(history):
            if failed.progressed:
                break
            stuck += failed.status is last.status
        return budget > 0 and stuck <= budget
