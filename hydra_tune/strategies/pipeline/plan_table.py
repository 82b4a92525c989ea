"""The plan of a pipelined trial for people: its stages, their devices, predicted and measured times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra_tune.core.devices import format_bytes
from hydra_tune.core.tables import Table


def describe(plan: Mapping[str, Any]) -> Iterator[str | Table]:
    """Yield a line on the placement and the step, then the table of stages."""
    yield (
        f"placed by {plan['placer']}, {plan['microbatches']} micro-batches, {plan['order']}: a step takes "
        f"{plan['measured_step_ms']:.1f} ms, {plan['predicted_step_ms']:.1f} predicted"
    )
    table = Table(
        ["stage", "device", "nodes", "bytes", "predicted ms", "measured ms"],
        numeric=frozenset({"stage", "bytes", "predicted ms", "measured ms"}),
    )
    for index, stage in enumerate(plan["stages"]):
        row = [str(index), stage["device"], _some(stage["nodes"]), format_bytes(stage["bytes"])]
        table.rows.append([*row, f"{stage['predicted_ms']:.1f}", f"{stage['measured_ms']:.1f}"])
    yield table


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} to {names[-1]} ({len(names)})"
