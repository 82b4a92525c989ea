"""The plan of an elastic trial for people: its clients, and their exchanges with the centre in each epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hydra_tune.core.tables import Table
from hydra_tune.strategies.subnets.plan_table import epochs_table


def describe(plan: Mapping[str, Any]) -> Iterator[str | Table]:
    """Yield a line on mode and clients, then the table of epochs."""
    several = f" of {plan['workers_per_client']} workers" if plan["workers_per_client"] > 1 else ""
    exchange = "no centre" if plan["mode"] == "allreduce" else f"an exchange every {plan['tau']} steps"
    yield f"mode {plan['mode']}, {plan['clients']} clients{several}; {exchange}"
    epochs = [
        {**epoch, "clients": epoch["subnets"] if "rounds" in epoch else _from_to(epoch["least"], epoch["most"])}
        for epoch in plan["epochs"]
    ]
    yield epochs_table(epochs, ("rounds" if plan["mode"] == "sync" else "exchanges", "clients", "lost"))


def _from_to(least: int, most: int) -> str:
    return str(most) if least == most else f"{least} to {most}"
