"""Measures the time in which the coordinator itself did not run: stopped by Ctrl-Z, or by a machine that stood still.

During a pause the coordinator sees no sign of life of its workers, so the pause does not count against their deadlines.
A timer that fires late reveals it: the event loop was not running when the timer was due.
"""

from __future__ import annotations

import asyncio

TICK_SECONDS = 0.2
LATE_SECONDS = 0.5
"""Smallest delay of a tick that counts as a pause; a busy loop is late by less."""


class Pauses:
    """Seconds in which the event loop did not run, since `start`."""

    def __init__(self) -> None:
        self._total = 0.0
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to measure; call on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + TICK_SECONDS
        self._timer = self._loop.call_at(self._due, self._tick)

    def stop(self) -> None:
        """End measuring."""
        if self._timer is not None:
            self._timer.cancel()

    def total(self) -> float:
        """Return the seconds so far, a pause that ends just now included."""
        late = self._loop.time() - self._due
        return self._total + (late if late > LATE_SECONDS else 0.0)

    def _tick(self) -> None:
        self._total = self.total()
        self.start()
