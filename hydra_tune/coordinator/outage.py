"""Patience with a database that is away: when to try again, and when to give up.

Trials go on meanwhile, and their results wait in memory. No I/O: the study's thread asks it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 10.0
MOST_ROWS = 200_000
"""Rows that may wait for a database that is away; then trials wait too."""


@dataclass
class Outage:
    """The present outage of a database, if any. Times are seconds of a monotonic clock."""

    patience: float
    """Seconds after which the search gives up."""
    show: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    since: float | None = None
    """Begin of the outage; None if the database answers."""
    pause: float = field(default=0.0, init=False)
    """Seconds until the next attempt to write."""

    @property
    def over(self) -> bool:
        """True if the database has been away for too long."""
        return self.since is not None and self.clock() - self.since >= self.patience

    def failed(self, reason: str) -> None:
        """Note that the database could not be written; show it the first time."""
        if self.since is None:
            self.since, self.pause = self.clock(), FIRST_PAUSE
            self.show(
                f"the database is away since {time.strftime('%H:%M:%S')} ({reason}); trials go on and results wait, "
                f"for {self.patience:g} s at most"
            )
        else:
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
        left = self.since + self.patience - self.clock()
        if left > 0:
            self.pause = min(self.pause, left)

    def ended(self) -> None:
        """Note that the database was written."""
        if self.since is not None:
            self.show(f"the database is back after {self.clock() - self.since:.1f} s; what waited is written")
            self.since, self.pause = None, 0.0
