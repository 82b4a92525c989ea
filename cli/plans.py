"""How a trial was trained, as `show` draws it: what each strategy laid down in the trial's plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import typer

from hydra_tune.cli.tables import Table, print_table
from hydra_tune.devices import format_bytes
from hydra_tune.errors import printable

Plan = Mapping[str, Any]


def print_plan(strategy: str | None, plan: Plan | None) -> None:
    """Draw the plan of a trial that this strategy trained; one that is not known here has nothing to draw."""
    draw = _DRAWN.get(strategy or "")
    if plan and draw is not None:
        draw(plan)


def _pipeline(plan: Plan) -> None:
    """The stages: where each is, and how long it was expected to take and took."""
    typer.echo(
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
    print_table(table)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} to {names[-1]} ({len(names)})"


def _sparse(plan: Plan) -> None:
    """What survived, and the bytes of state and of a step against dense training."""
    replicas = f"{plan['replicas']} replica{'s' if plan['replicas'] > 1 else ''}"
    if plan["phase"] == "dense":
        typer.echo(f"{replicas}, in dense training: its mask ({plan['mask']}) had not settled")
    else:
        typer.echo(
            f"{replicas}, {plan['survivors']} of {plan['pruned_weights']} weights survive (mask: {plan['mask']}, "
            f"{plan['precision']} precision)"
        )
    table = Table(["", "bytes", "dense", "saved"], numeric=frozenset({"bytes", "dense", "saved"}))
    for what, name in (("state of a replica", "state_bytes"), ("gradients of a step", "step_bytes")):
        own, dense = plan[name], plan[f"dense_{name}"]
        table.rows.append([what, format_bytes(own), format_bytes(dense), f"{1 - own / dense:.1%}" if dense else ""])
    print_table(table)


def _whole(plan: Plan) -> None:
    typer.echo(printable(f"trained as a whole: {plan['whole_because']}"))


def _ist(plan: Plan) -> None:
    """What was dealt out to subnets, and what each epoch took."""
    dealt = " and ".join(f"{count} {kind}" for kind, count in plan["dealt"].items())
    typer.echo(
        f"{plan['subnets']} subnets of {plan['local_steps']} local steps; {dealt or 'no parts'} are dealt out; "
        f"a subnet has {plan['subnet_parameters']} of {plan['parameters']} parameters"
    )
    _epochs(plan["epochs"], ("rounds", "subnets", "lost"))


def _elastic(plan: Plan) -> None:
    """How clients and the centre exchanged, and how many clients there were in each epoch."""
    several = f" of {plan['workers_per_client']} workers" if plan["workers_per_client"] > 1 else ""
    exchange = "no centre" if plan["mode"] == "allreduce" else f"an exchange every {plan['tau']} steps"
    typer.echo(f"mode {plan['mode']}, {plan['clients']} clients{several}; {exchange}")
    epochs = [
        {**epoch, "clients": epoch["subnets"] if "rounds" in epoch else _from_to(epoch["least"], epoch["most"])}
        for epoch in plan["epochs"]
    ]
    _epochs(epochs, ("rounds" if plan["mode"] == "sync" else "exchanges", "clients", "lost"))


def _from_to(least: int, most: int) -> str:
    return str(most) if least == most else f"{least} to {most}"


def _epochs(epochs: Sequence[Plan], names: Sequence[str]) -> None:
    """What each epoch took, with the bytes that were communicated."""
    table = Table(["epoch", *names, "bytes"], numeric=frozenset({"epoch", *names, "bytes"}))
    for number, epoch in enumerate(epochs, start=1):
        table.rows.append([str(number), *(str(epoch[name]) for name in names), format_bytes(epoch["bytes"])])
    print_table(table)


_DRAWN: dict[str, Callable[[Plan], None]] = {
    "pipeline": _pipeline, "sparse": _sparse, "ist": _ist, "elastic": _elastic, "whole": _whole
}  # fmt: skip
