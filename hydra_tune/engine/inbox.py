"""Queue of a worker: units in the scheduler's order, and attempts to free.

The coordinator may hand out several units in advance if their order is fixed. A later unit with a smaller order runs
first. An attempt's state is freed before other attempts' units run, but after its own earlier units: the next unit may
need the memory.
"""

from __future__ import annotations

import threading

from hydra_tune.engine.messages import Drop, RunUnit


class Inbox:
    """Messages for the thread that runs units, written by the thread that reads the channel."""

    def __init__(self) -> None:
        self._waiting: list[RunUnit | Drop] = []
        """Messages in order of arrival."""
        self._news = threading.Condition()

    def put(self, message: RunUnit | Drop) -> None:
        with self._news:
            self._waiting.append(message)
            self._news.notify()

    def get(self) -> RunUnit | Drop:
        """Wait for and return the message to handle first."""
        with self._news:
            self._news.wait_for(lambda: self._waiting)
            return self._waiting.pop(self._first())

    def _first(self) -> int:
        drop = next((i for i, message in enumerate(self._waiting) if isinstance(message, Drop)), None)
        before = self._waiting if drop is None else self._waiting[:drop]
        ending = None if drop is None else self._waiting[drop].attempt
        units = [
            (message.order, index)
            for index, message in enumerate(before)
            if isinstance(message, RunUnit) and ending in (None, message.attempt)
        ]
        if units:
            return min(units)[1]
        assert drop is not None
        return drop
