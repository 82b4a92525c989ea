"""Records the size of the spill store during a search: the total over time, and each trial's peak.

The coordinator reads file sizes a few times a second, on a thread; so files of every strategy count, and workers have
nothing to do. Changes are written with the next batch of records. Files that come and go between two checks are missed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hydra_tune.spill.places import lying

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
LOOK_SHARE = 0.01
"""Largest share of time spent on checks: a store with very many files is checked less often."""


class SpillWatch:
    """Watches the directories of one run."""

    def __init__(
        self,
        places: Sequence[str],
        record: Callable[[float, int, int], None],
        of_trial: Callable[[int, int], None],
    ) -> None:
        """`record` gets the time and the bytes in host memory and on disk when they change.

        `of_trial` gets each trial's number and bytes.
        """
        self._places = [Path(place) for place in places]
        self._record = record
        self._of_trial = of_trial
        self._told: tuple[int, int] | None = None

    async def until_cancelled(self) -> None:
        """Check repeatedly."""
        while True:
            began = time.monotonic()
            await self.look()
            took = time.monotonic() - began
            await asyncio.sleep(max(LOOK_SECONDS, took / LOOK_SHARE))

    async def look(self) -> None:
        """Record the current bytes."""
        try:
            found = await asyncio.to_thread(lying, self._places)
        except OSError as error:
            logger.warning("the size of the spill store could not be read: %s", error)
            return
        for number, one in found.items():
            self._of_trial(number, one.host + one.disk)
        self._tell(sum(one.host for one in found.values()), sum(one.disk for one in found.values()))

    def ended(self) -> None:
        """Record that the run's directories are about to be deleted."""
        self._tell(0, 0)

    def _tell(self, host: int, disk: int) -> None:
        if self._told != (host, disk):
            self._told = (host, disk)
            self._record(time.time(), host, disk)
