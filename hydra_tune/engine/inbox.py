"""What waits at a worker: units in the scheduler's order, and what is to be freed.

The coordinator may hand out more than one unit in advance, where their order can be told once and for all. One that
comes later and goes first is then taken before those that wait already. What an attempt has is freed before anything
else, but after its own units that came before: the memory may be needed by whoever is next.
"""

from __future__ import annotations

import threading

from hydra_tune.engine.messages import Drop, Run


class Inbox:
    """Messages for the thread that runs units, put there by the one that reads them."""

    def __init__(self) -> None:
        self._waiting: list[Run | Drop] = []
        """As they came."""
        self._news = threading.Condition()

    def put(self, message: Run | Drop) -> None:
        with self._news:
            self._waiting.append(message)
            self._news.notify()

    def get(self) -> Run | Drop:
        """The first of what waits; waits for it."""
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
            if isinstance(message, Run) and ending in (None, message.attempt)
        ]
        if units:
            return min(units)[1]
        assert drop is not None
        return drop
