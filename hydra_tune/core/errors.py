"""The errors that Hydra Tune raises on purpose, but for those that end one trial (`engine.unit.TrialEnded`).

    HydraTuneError
    ├── InputError           what the user gave is wrong: exit code 2
    │   ├── CandidateError   a field of a Candidate
    │   ├── SpecError        a YAML file, a flag, a name
    │   └── StorageError     a database that cannot be used
    │       ├── DatabaseAway     it cannot be reached or written for now
    │       └── UnstorableError  a value that it cannot hold
    ├── Infeasible           a candidate that no cutting makes fit the devices
    ├── MachineError         the machine has no more memory, space or files for the search: exit code 1
    ├── PlacementInfeasible  a graph that no placement makes fit the devices
    ├── SearchFailed         no trial completed: exit code 1
    └── WorkerLost           a worker process ended while it had work

A message states what happened and quotes the value; the hint states the fix. Both fit on one line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class HydraTuneError(Exception):
    """Base of all deliberate errors: a one-line message of what happened and a one-line hint with the fix."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InputError(HydraTuneError, ValueError):
    """The user's input cannot be used."""


class CandidateError(InputError):
    """A field of a Candidate is wrong."""


class SpecError(InputError):
    """A specification file, a flag or a name is wrong."""


class StorageError(InputError):
    """A database cannot be opened, read or written."""


class DatabaseAway(StorageError):
    """A database cannot be reached or written for now; it may come back."""


class UnstorableError(StorageError):
    """A value does not fit into a column of the database, now or ever."""


class Infeasible(HydraTuneError):
    """A candidate cannot be cut into shards that fit: some part needs more memory than a device has."""

    def __init__(
        self, message: str, hint: str = "", *, node: str = "", needed_bytes: int = 0, smallest_budget: int = 0
    ) -> None:
        super().__init__(message, hint)
        self.node = node
        """The node that does not fit, or the last node of a group that cannot be cut apart."""
        self.needed_bytes = needed_bytes
        self.smallest_budget = smallest_budget
        """The smallest `device_memory`, in bytes rounded to whole MiB, with which the whole model can be trained."""


class PlacementInfeasible(HydraTuneError, ValueError):
    """No placement of a graph's nodes keeps every device within its memory."""

    def __init__(self, message: str, hint: str = "", *, lacking_bytes: float = 0, proven: bool = True) -> None:
        super().__init__(message, hint)
        self.lacking_bytes = lacking_bytes
        """Extra bytes on each device with which a placement exists."""
        self.proven = proven
        """True if every placement is ruled out; False if the search was given up, as in large graphs."""


class NoRoom(HydraTuneError):
    """Weights could not be written: the search stops and can be resumed once there is disk space."""


class MachineError(HydraTuneError):
    """The machine has no more memory, space, files or processes for the coordinator."""

    @classmethod
    def of(cls, error: OSError | MemoryError, hint: str = "") -> MachineError:
        """Describe an error of the operating system; a MemoryError says nothing by itself."""
        return cls(str(error) or "the coordinator is out of memory", hint)


class SearchFailed(HydraTuneError):
    """The search ended without a completed trial."""

    result: Any = None
    """The `SearchResult`, whose `trials` have each trial's state and error; None if the search ended before it had one.
    """


class WorkerLost(HydraTuneError):
    """A worker process ended while it had work."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the closest known name, then the list of all known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    listing = "known: " + ", ".join(names)
    return f"did you mean {close[0]!r}? {listing}" if close else listing


def printable(text: str) -> str:
    """Return `text` made safe for a terminal: control characters, such as escape codes, become `\\x..` codes."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)


def shortened(text: str, limit: int) -> str:
    """Return a text of at most about `limit` characters: its head and its tail, and the number of those between."""
    if len(text) <= limit:
        return text
    head, tail = 2 * limit // 3, limit // 3
    return f"{text[:head]} … {len(text) - head - tail} characters left out … {text[-tail:]}"


def quoted(value: object, limit: int = 60) -> str:
    """Return `repr(value)` for use in a message: printable, on one line, at most `limit` characters."""
    text = " ".join("".join(c if c.isprintable() else " " for c in repr(value)).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
