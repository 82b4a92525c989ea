"""Every error that Hydra Tune raises on purpose.

    HydraTuneError
    ├── InputError           what the user gave is wrong: exit code 2
    │   ├── CandidateError   a field of a Candidate
    │   ├── SpecError        a YAML file, a flag, a name
    │   └── StorageError     a database that cannot be used
    ├── Infeasible           a candidate that no cutting makes fit the devices
    ├── PlacementInfeasible  a graph that no placement makes fit the devices
    ├── SearchFailed         no trial completed: exit code 1
    └── WorkerLost           a worker process ended while it had work

A message says what happened and quotes the value; the hint says how to mend it. Both fit on one line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HydraTuneError(Exception):
    """Base of all deliberate errors: one line of what happened, one hint of how to mend it."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InputError(HydraTuneError, ValueError):
    """What the user gave cannot be used."""


class CandidateError(InputError):
    """A field of a Candidate is wrong."""


class SpecError(InputError):
    """A specification file, a flag or a name is wrong."""


class StorageError(InputError):
    """A database cannot be opened, read or written."""


class Infeasible(HydraTuneError):
    """A candidate cannot be cut into shards that fit: some part of it takes more than a device has."""

    def __init__(
        self, message: str, hint: str = "", *, node: str = "", needed_bytes: int = 0, smallest_budget: int = 0
    ) -> None:
        super().__init__(message, hint)
        self.node = node
        """The node that does not fit, or the last one of those that cannot be cut apart."""
        self.needed_bytes = needed_bytes
        self.smallest_budget = smallest_budget
        """The smallest `device_memory` with which the whole model can be trained, in whole MiB."""


class PlacementInfeasible(HydraTuneError, ValueError):
    """The nodes of a graph cannot be spread over the devices so that each has the memory for its own."""

    def __init__(self, message: str, hint: str = "", *, lacking_bytes: float = 0, proven: bool = True) -> None:
        super().__init__(message, hint)
        self.lacking_bytes = lacking_bytes
        """With so much more on each device there is a placement."""
        self.proven = proven
        """Whether all placements are ruled out; False where the search for one was given up, as in large graphs."""


class SearchFailed(HydraTuneError):
    """The search ended without one completed trial."""


class WorkerLost(HydraTuneError):
    """A worker process ended while it had work."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the nearest known one, then all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    listing = "known: " + ", ".join(names)
    return f"did you mean {close[0]!r}? {listing}" if close else listing


def printable(text: str) -> str:
    """Text from elsewhere as a terminal may get it: control characters, such as escape codes, are shown as codes."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)


def quoted(value: object, limit: int = 60) -> str:
    """`value` as it may stand in a message: printable, on one line, and not too long."""
    text = " ".join("".join(c if c.isprintable() else " " for c in repr(value)).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
