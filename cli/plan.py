"""`hydra-tune plan SPEC`: what would be trained how, and why, without training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hydra_tune.cli.options import Json, Storage

if TYPE_CHECKING:
    from hydra_tune.plan_search import PlannedTrial, SearchPlan
    from hydra_tune.planning.outlook import Outlook

SAMPLE = 4


def plan(
    spec: Annotated[str, typer.Argument(help="A YAML file, file.py:build, or package.module:build.", metavar="SPEC")],
    trials: Annotated[int, typer.Option(help="How many candidates are built and looked at.")] = SAMPLE,
    storage: Storage = None,
    devices: Annotated[str | None, typer.Option(help="auto, 2xcpu, or cuda:0,cuda:1.")] = None,
    device_memory: Annotated[str | None, typer.Option(help="Budget of each device, such as 8GiB.")] = None,
    spill: Annotated[str | None, typer.Option(help="Directory for what processes hand to each other.")] = None,
    strategy: Annotated[
        str | None, typer.Option(help="auto, any, a strategy, or several to choose from, as in whole,pipeline.")
    ] = None,
    sampler: Annotated[str | None, typer.Option(help="tpe, random, cmaes, gp, qmc, grid or nsgaii.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the candidates.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs of each candidate of a built-in family.")] = None,
    data: Annotated[str | None, typer.Option(help="Data set for built-in families.")] = None,
    as_json: Json = False,
) -> int:
    """Build some candidates, measure them, and say by which strategy each would be trained, and how long all would
    take. Nothing is trained; what is measured is kept for the search."""
    from hydra_tune.errors import SpecError
    from hydra_tune.plan_search import plan_search
    from hydra_tune.spec import read_spec, strategy_flag

    if trials < 1:
        raise SpecError(f"trials cannot be {trials}", "give how many candidates to look at, 1 or more")
    flags: dict[str, Any] = {
        "storage": storage, "devices": devices, "device_memory": device_memory, "spill": spill,
        "strategy": strategy_flag(strategy),
        "sampler": sampler, "seed": seed, "epochs": epochs, "data": data,
    }  # fmt: skip
    if not spec.endswith((".yaml", ".yml")):
        flags["trials"] = trials  # a build function alone does not say how many there will be
    found = plan_search(read_spec(spec, flags), trials)
    if as_json:
        _print_json(found)
    else:
        _print(found)
    return 0


def _print(found: SearchPlan) -> None:
    from hydra_tune.cli.tables import short_params
    from hydra_tune.errors import printable

    for trial in found.trials:
        typer.echo(printable(f"candidate {trial.number}: {short_params(trial.params)}"))
        if trial.choice is None:
            typer.echo(printable(f"  cannot be trained: {trial.refused}"))
        else:
            print_options(trial.choice.stored())
    typer.echo(_ahead(found))


def print_options(choice: dict[str, Any]) -> None:
    """The strategies that were considered, the chosen one marked, and why."""
    from hydra_tune.cli.tables import Table, print_table
    from hydra_tune.devices import format_bytes
    from hydra_tune.errors import printable

    names = ["", "strategy", "parts", "seconds", "device", "host", "moved", "against it"]
    table = Table(names, numeric=frozenset(names[2:7]))
    for option in choice["options"]:
        mark = "*" if option["strategy"] == choice["strategy"] else ""
        if option["refused"]:
            table.rows.append([mark, option["strategy"], "", "", "", "", "", printable(option["refused"])])
            continue
        sizes = [option["device_bytes"], option["host_bytes"] + option["disk_bytes"], option["communicated_bytes"]]
        table.rows.append(
            [mark, option["strategy"], str(option["parts"]), _seconds(option["seconds"]),
             *(format_bytes(size) if size else "" for size in sizes), ""]
        )  # fmt: skip
    if table.rows:
        print_table(table)
    typer.echo(printable(f"  {choice['strategy']}: {choice['because']}"))


def _ahead(found: SearchPlan) -> str:
    """What the whole search would take, and what would make it quicker."""
    now = found.now
    devices = f"{now.pool.devices} device{'s' if now.pool.devices > 1 else ''}"
    if not now.makespan:
        return f"none of {len(found.trials)} candidates can be trained on {devices}"
    lines = [
        f"{found.total} such trial{'s' if found.total > 1 else ''} on {devices}: about {_duration(now.makespan)}; "
        f"no schedule takes less than {_duration(now.bound)}"
    ]
    if now.infeasible:
        lines.append(f"{now.infeasible} of {len(found.trials)} candidates cannot be trained, and are not counted")
    lines.append(f"with one more device: {_compared(found.one_more_device, now)}")
    lines.append(f"with twice the memory: {_compared(found.twice_the_memory, now)}")
    return "\n".join(lines)


def _compared(other: Outlook, now: Outlook) -> str:
    gained = now.infeasible - other.infeasible
    more = f", and {gained} more candidates can be trained" if gained > 0 else ""
    ratio = now.makespan / other.makespan if other.makespan else 1.0
    quicker = f"{ratio:.2f} times as quick" if ratio >= 1.01 else "no quicker"
    return f"about {_duration(other.makespan)}, {quicker}{more}"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def _print_json(found: SearchPlan) -> None:
    from hydra_tune.cli.tables import print_json

    def trial(one: PlannedTrial) -> dict[str, Any]:
        choice = None if one.choice is None else one.choice.stored()
        return {"number": one.number, "params": one.params, "choice": choice, "refused": one.refused}

    def ahead(one: Outlook) -> dict[str, Any]:
        return {"devices": one.pool.devices, "device_memory": one.pool.memory, "makespan_seconds": one.makespan,
                "lower_bound_seconds": one.bound, "infeasible": one.infeasible}  # fmt: skip

    print_json({
        "trials": found.total, "candidates": [trial(one) for one in found.trials], "search": ahead(found.now),
        "one_more_device": ahead(found.one_more_device), "twice_the_memory": ahead(found.twice_the_memory),
    })  # fmt: skip
