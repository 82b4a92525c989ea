"""What waits at a worker: units in the scheduler's order, and what is to be freed, after the units that came before.

The coordinator may hand out more than one unit in advance, where their order can be told once and for all. One that
comes later and goes first is then taken before those that wait already.
"""

from __future__ import annotations

import itertools
import queue

from hydra_tune.engine.messages import Drop, Run


class Inbox:
    """Messages for the thread that runs units, put there by the one that reads them."""

    def __init__(self) -> None:
        self._waiting: queue.PriorityQueue[tuple[int, bool, tuple[float, ...], int, Run | Drop]] = queue.PriorityQueue()
        self._drops = 0
        self._count = itertools.count()

    def put(self, message: Run | Drop) -> None:
        """What came before a `Drop` stays before it, and what comes after stays after it."""
        dropping = isinstance(message, Drop)
        order = () if isinstance(message, Drop) else message.order
        self._waiting.put((self._drops, dropping, order, next(self._count), message))
        self._drops += dropping

    def get(self) -> Run | Drop:
        """The first of what waits; waits for it."""
        return self._waiting.get()[-1]
