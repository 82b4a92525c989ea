"""How long a unit may show no sign of life before it counts as hung: from what its kind has taken so far."""

from __future__ import annotations

LEAST_SECONDS = 120.0
"""No unit is given up earlier, however quick its kind has been: machines pause."""
LEAST_BUILD_SECONDS = 3600.0
"""A build is user code from end to end, perhaps a whole objective, and one may well take far longer than another."""
TIMES_THE_LONGEST = 20.0
MEASUREMENTS_NEEDED = 3


class Deadlines:
    """Deadlines by kind of unit. A fixed one, given by the user, holds for all kinds."""

    def __init__(self, fixed: float | None = None) -> None:
        self._fixed = fixed
        self._longest: dict[str, float] = {}
        self._count: dict[str, int] = {}

    def measured(self, kind: str, seconds: float) -> None:
        """A unit of this kind took so long."""
        self._longest[kind] = max(self._longest.get(kind, 0.0), seconds)
        self._count[kind] = self._count.get(kind, 0) + 1

    def of(self, kind: str) -> float | None:
        """Seconds for a unit of this kind; None while too little is known to give one up."""
        if self._fixed is not None:
            return self._fixed
        if self._count.get(kind, 0) < MEASUREMENTS_NEEDED:
            return None
        least = LEAST_BUILD_SECONDS if kind == "build" else LEAST_SECONDS
        return max(least, TIMES_THE_LONGEST * self._longest[kind])
