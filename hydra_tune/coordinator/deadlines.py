"""Deadlines: seconds without a sign of life after which a unit counts as hung, from past times of its kind."""

from __future__ import annotations

LEAST_SECONDS = 120.0
"""Shortest deadline of a unit in seconds, however fast its kind has been: machines pause."""
LEAST_BUILD_SECONDS = 3600.0
"""Shortest deadline of a build in seconds: user code, perhaps a whole objective, whose times vary widely."""
TIMES_THE_LONGEST = 20.0
MEASUREMENTS_NEEDED = 3


class Deadlines:
    """Deadlines by kind of unit, in seconds. A fixed one, given by the user, applies to all kinds."""

    def __init__(self, fixed: float | None = None) -> None:
        self._fixed = fixed
        self._longest: dict[str, float] = {}
        self._count: dict[str, int] = {}

    def measured(self, kind: str, seconds: float) -> None:
        """Record the seconds of a unit of this kind."""
        self._longest[kind] = max(self._longest.get(kind, 0.0), seconds)
        self._count[kind] = self._count.get(kind, 0) + 1

    def of(self, kind: str) -> float | None:
        """Return the deadline in seconds for a unit of this kind; None before enough is measured."""
        if self._fixed is not None:
            return self._fixed
        if self._count.get(kind, 0) < MEASUREMENTS_NEEDED:
            return None
        least = LEAST_BUILD_SECONDS if kind == "build" else LEAST_SECONDS
        return max(least, TIMES_THE_LONGEST * self._longest[kind])
