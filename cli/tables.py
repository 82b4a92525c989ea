"""Tables and JSON output of the commands that show studies and trials."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hydra_tune.core.errors import printable
from hydra_tune.core.tables import Table

if TYPE_CHECKING:
    from hydra_tune.storage.queries import TrialRecord


def print_table(table: Table) -> None:
    """Print a table on stdout. Cells are printed literally: names are data, never markup or escape codes.

    On a terminal, lines are cut at its width rather than wrapped; a pipe gets them whole, as do `show` and --json.
    """
    from rich.cells import cell_len, set_cell_size

    lines = [[" ".join(printable(cell).split("\n")) for cell in row] for row in (table.columns, *table.rows)]
    widths = [max(cell_len(line[i]) for line in lines) for i in range(len(table.columns))]
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    if table.title:
        print(printable(table.title))
    for line in lines:
        cells = [
            " " * (width - cell_len(cell)) + cell if column in table.numeric else set_cell_size(cell, width)
            for cell, width, column in zip(line, widths, table.columns, strict=True)
        ]
        text = "  ".join(cells).rstrip()
        if room is not None and cell_len(text) > room:
            text = set_cell_size(text, room - 1) + "…"
        print(text)


def print_json(document: Any) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(plain(document)))


def plain(value: Any) -> Any:
    """Return the value for JSON: NaN and infinities, which JSON lacks, become text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def leaderboard(
    records: Iterable[TrialRecord], metrics: Sequence[str], directions: Sequence[str], limit: int | None = 10
) -> Table:
    """Return a table of the completed trials, best first, then the others by number."""
    sign = -1.0 if directions[0] == "maximize" else 1.0

    def rank(record: TrialRecord) -> tuple[float, float]:
        values = record.values if record.state == "COMPLETE" else None
        return (sign * values[0] if values else math.inf, record.number)

    ordered = sorted(records, key=rank)
    hidden = 0 if limit is None else max(0, len(ordered) - limit)
    table = trials_table(ordered[:limit], metrics)
    table.title = f"the best {limit} of {len(ordered)} trials" if hidden else ""
    return table


def trials_table(records: Iterable[TrialRecord], metrics: Sequence[str]) -> Table:
    """Return a table with one row per trial, in the order given."""
    from hydra_tune.core.devices import format_bytes

    records = list(records)
    # An objective trains by itself: no strategy trains it, and its memory is not counted on CPUs.
    hidden = {
        name for name, column in (("strategy", "strategy"), ("memory", "peak_device_bytes"))
        if not any(getattr(record, column) for record in records)
    }  # fmt: skip
    columns = ["trial", *metrics, "state", "strategy", "seconds", "memory", "parameters"]
    shown = [place for place, name in enumerate(columns) if name not in hidden or name in metrics]
    table = Table([columns[place] for place in shown])
    table.numeric = frozenset({"trial", "seconds", "memory", *metrics})
    for record in records:
        values = record.values or [None] * len(metrics)
        what = record.error if record.error else short_params(record.params)
        row = [
            str(record.number), *(number(value) for value in values), record.state, record.strategy or "",
            "" if record.seconds is None else f"{record.seconds:.1f}",
            "" if record.peak_device_bytes is None else format_bytes(record.peak_device_bytes), what,
        ]  # fmt: skip
        table.rows.append([row[place] for place in shown])
    return table


def short_params(params: dict[str, Any]) -> str:
    """Format parameters on one line, without the family's prefix if the family is among them."""
    prefix = f"{params.get('family')}."
    return " ".join(
        f"{name.removeprefix(prefix)}={f'{value:.3g}' if isinstance(value, float) else value}"
        for name, value in params.items()
    )


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"
