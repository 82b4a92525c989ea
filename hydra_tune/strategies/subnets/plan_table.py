"""The plan of a trial in subnets for people: the parts dealt out, and the counts of each epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra_tune.core.devices import format_bytes
from hydra_tune.core.tables import Table


def describe(plan: Mapping[str, Any]) -> Iterator[str | Table]:
    """Yield a line on the subnets, then the table of epochs."""
    dealt = " and ".join(f"{count} {kind}" for kind, count in plan["dealt"].items())
    yield (
        f"{plan['subnets']} subnets of {plan['local_steps']} local steps; {dealt or 'no parts'} are dealt out; "
        f"a subnet has {plan['subnet_parameters']} of {plan['parameters']} parameters"
    )
    yield epochs_table(plan["epochs"], ("rounds", "subnets", "lost"))


def epochs_table(epochs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Table:
    """Return a table of these facts and the communicated bytes of each epoch."""
    table = Table(["epoch", *names, "bytes"], numeric=frozenset({"epoch", *names, "bytes"}))
    for number, epoch in enumerate(epochs, start=1):
        table.rows.append([str(number), *(str(epoch[name]) for name in names), format_bytes(epoch["bytes"])])
    return table
