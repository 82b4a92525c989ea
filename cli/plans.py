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
    if not plan:
        return
    _choices(plan)
    draw = _DRAWN.get(strategy or "")
    if draw is not None and plan.keys() - {"choice"}:
        draw(plan)


def _choices(plan: Plan) -> None:
    """Why this strategy, what it was expected to take and what it took; those before it, of a trial that moved on."""
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
    """What survived, and what a pruned network takes against a dense one."""
    way = plan.get("way", "replicas")
    if plan["phase"] == "dense":
        where = "in shards" if way == "shards" else _count(plan["replicas"], "replica")
        typer.echo(f"{where}, in dense training: its mask ({plan['mask']}) had not settled")
    else:
        where = {"replicas": _replicas, "stages": _stages, "shards": _shards}[way](plan)
        typer.echo(
            f"{where}, {plan['survivors']} of {plan['pruned_weights']} weights survive (mask: {plan['mask']}, "
            f"{plan['precision']} precision)"
        )
    if way == "replicas":
        _against_dense(plan)
    elif "stages" in plan:
        _pipeline(plan)


def _replicas(plan: Plan) -> str:
    return _count(plan["replicas"], "replica")


def _stages(plan: Plan) -> str:
    """How many devices a network is on, and how many it would need without pruning."""
    dense = plan["dense_stages"]
    needed = "would not fit any number" if dense is None else f"would need {dense}"
    return f"{_count(plan['devices'], 'stage')}; dense {needed}"


def _shards(plan: Plan) -> str:
    state, weights = format_bytes(plan["state_bytes"]), format_bytes(plan["weight_bytes"])
    return f"{_count(plan['shards'], 'shard')} of {state} of state, {weights} of it dense weights"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _against_dense(plan: Plan) -> None:
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
