"""Prints a trial's plan for `show`: the choice of its strategy, and the strategy's own plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from hydra_tune.cli.tables import print_table
from hydra_tune.core.devices import format_bytes
from hydra_tune.core.errors import printable
from hydra_tune.core.tables import Table
from hydra_tune.strategies.registry import find_strategy

Plan = Mapping[str, Any]


def print_plan(strategy: str | None, plan: Plan | None) -> None:
    """Print the plan of a trial that this strategy trained; for an unknown strategy, only the choice."""
    if not plan:
        return
    _choices(plan)
    kind = find_strategy(strategy or "")
    if kind is None or not plan.keys() - {"choice"}:
        return
    for part in kind.describe_plan(plan):
        if isinstance(part, Table):
            print_table(part)
        else:
            typer.echo(printable(part))


def _choices(plan: Plan) -> None:
    """Print the reason for the strategy and its predicted and measured cost, and any earlier strategies."""
    from hydra_tune.cli.plan import print_options

    if "choice" not in plan:
        return
    chosen = plan["choice"]
    for choice in (*chosen.get("earlier", ()), chosen):
        print_options(dict(choice))
        if "measured_batch_ms" in choice:
            typer.echo(
                f"  a batch took {choice['measured_batch_ms']:.1f} ms, {choice['predicted_batch_ms']:.1f} predicted "
                f"({choice['time_error']:+.0%})"
            )
    expected, measured = chosen["predicted_device_bytes"], chosen["measured_device_bytes"]
    if expected and measured:
        held = f"{format_bytes(measured)}, {format_bytes(expected)} predicted"
        typer.echo(f"  a device held {held} ({measured / expected - 1:+.0%})")
