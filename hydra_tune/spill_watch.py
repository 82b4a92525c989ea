"""Records what lies in the spill store while a search runs: for all trials together over time, for each one its peak.

The coordinator looks at the files' sizes a few times a second, on a thread; so whatever strategy put them there counts,
and no worker does anything for it. What changed is written with the next batch of records. What comes and goes between
two looks is not seen.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hydra_tune.engine.spill import lying

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
LOOK_SHARE = 0.01
"""Looking takes at most this share of the time: a store of very many files is looked at less often."""


class SpillWatch:
    """Watches the directories of one run."""

    def __init__(
        self,
        places: Sequence[str],
        record: Callable[[float, int, int], None],
        of_trial: Callable[[int, int], None],
    ) -> None:
        """`record` is told the moment and the bytes in host memory and on disk when they change; `of_trial` each
        trial's number and bytes."""
        self._places = [Path(place) for place in places]
        self._record = record
        self._of_trial = of_trial
        self._told: tuple[int, int] | None = None

    async def until_cancelled(self) -> None:
        """Look now and again."""
        while True:
            began = time.monotonic()
            await self.look()
            took = time.monotonic() - began
            await asyncio.sleep(max(LOOK_SECONDS, took / LOOK_SHARE))

    async def look(self) -> None:
        """Record what lies there now."""
        try:
            found = await asyncio.to_thread(lying, self._places)
        except OSError as error:
            logger.warning("the spill store could not be looked at: %s", error)
            return
        for number, one in found.items():
            self._of_trial(number, one.host + one.disk)
        self._tell(sum(one.host for one in found.values()), sum(one.disk for one in found.values()))

    def ended(self) -> None:
        """The run's directories are about to go, with all that lies there."""
        self._tell(0, 0)

    def _tell(self, host: int, disk: int) -> None:
        if self._told != (host, disk):
            self._told = (host, disk)
            self._record(time.time(), host, disk)
