"""Counts the trials on each device, for strategies whose trials each occupy some devices to their end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class DeviceOccupancy:
    """The number of trials on each device, by position."""

    def __init__(self) -> None:
        self._taken: Counter[int] = Counter()

    @contextmanager
    def taken(self, count: int, devices: int) -> Iterator[list[int]]:
        """Occupy the `count` devices with the fewest trials for the duration of the block; yields them in order."""
        chosen = sorted(sorted(range(devices), key=lambda device: self._taken[device])[:count])
        self._taken.update(chosen)
        try:
            yield chosen
        finally:
            self._taken.subtract(chosen)
