"""Which devices the trials of a search have taken, where each takes some of them for as long as it lasts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Seats:
    """Devices by their position, and how many trials are on each."""

    def __init__(self) -> None:
        self._taken: Counter[int] = Counter()

    @contextmanager
    def taken(self, count: int, devices: int) -> Iterator[list[int]]:
        """So many of the devices, those with the fewest trials, until the end; in their order."""
        chosen = sorted(sorted(range(devices), key=lambda device: self._taken[device])[:count])
        self._taken.update(chosen)
        try:
            yield chosen
        finally:
            self._taken.subtract(chosen)
