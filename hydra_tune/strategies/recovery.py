"""The rule by which strategies that commit (shard, sparse, ist, elastic) repeat lost work or give up the attempt.

A lost worker takes with it the work since the last commit, and that work is repeated. If several workers are lost
without progress in between, the trial may be what kills them: the attempt ends, and `coordinator/retries.py` decides
whether the trial gets another. In whole and pipeline, which do not commit, a lost worker ends the attempt at once.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

AGAIN = 2
"""Number of times the same work is repeated after losses."""


@dataclass
class Recovery:
    """Counts the losses of one trial since its last progress."""

    losses: int = 0
    """Losses at the current position."""
    _position: Hashable = None

    def again(self, position: Hashable = None, members: int = 1) -> bool:
        """Count a loss at this position; return True if the work should be repeated.

        A position is any value that changes when the trial makes progress; None means unknown, and counts as the
        previous position. Work shared by `members` may be lost `AGAIN` times by each.
        """
        if position is not None and position != self._position:
            self._position, self.losses = position, 0
        self.losses += 1
        return self.losses <= AGAIN * members
