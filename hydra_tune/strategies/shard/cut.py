"""A trial in shards as plain data: its cut, its place in the spill store, and the outcome of a unit.

The coordinator and the workers exchange these; nothing here needs tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ShardCut:
    """A trial in shards as the coordinator knows it."""

    shards: int
    history: list[dict[str, float]]
    notes: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    name: str = ""
    kit: str = ""
    """Path of the kit's file."""
    comparison: str = ""
    """Result of comparing the first batch with the whole model's, true once it is trained, or why it is not compared;
    empty where it does not apply."""


@dataclass(frozen=True)
class Spilled:
    """The place of a trial's state and kit in the spill store, and the number of commits so far."""

    places: tuple[str, ...]
    name: str
    kit: str
    commits: int
    double_buffering: bool = True


@dataclass(frozen=True)
class SliceDone:
    """The outcome of a unit, and the bytes that it moved."""

    value: Any
    commits: int
    committed: bool
    """True if another worker could take the trial up from here."""
    read_bytes: int
    written_bytes: int


@dataclass(frozen=True)
class At:
    """Position of a batch in a trial: its epoch, its number, and True for `judging` if it is validation data."""

    epoch: int
    batch: int
    judging: bool = False
