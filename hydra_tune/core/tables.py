"""Tables as plain data, independent of how they are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

NUMERIC = frozenset({"trial", "trials", "value", "seconds", "memory", "epoch", "units", "share"})
"""Columns that hold numbers and are aligned right, unless a table overrides `numeric`."""


@dataclass
class Table:
    """Rows of plain text under headings."""

    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    title: str = ""
    numeric: frozenset[str] = NUMERIC
