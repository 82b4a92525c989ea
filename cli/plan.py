"""`hydra-tune plan SPEC`: shows the chosen strategies and their reasons, without training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hydra_tune.cli.options import Data, Epochs, Json, Spec, with_settings

if TYPE_CHECKING:
    from hydra_tune.coordinator.plan_search import PlannedTrial, SearchPlan
    from hydra_tune.planner.search_time import SearchTime

SAMPLE = 4


@with_settings(
    storage=None, devices=None, device_memory=None, spill=None,
    strategy="auto, any, a strategy, or several to choose from, as in whole,pipeline.", sampler=None,
    seed="Seed of the candidates.",
)  # fmt: skip
def plan(
    spec: Spec,
    trials: Annotated[int, typer.Option(help="How many candidates are built and looked at.")] = SAMPLE,
    *,
    epochs: Epochs = None,
    data: Data = None,
    as_json: Json = False,
    **flags: Any,
) -> int:
    """Build some candidates, measure them, and say by which strategy each would be trained, and how long all would
    take. Nothing is trained; what is measured is kept for the search."""
    from hydra_tune.coordinator.plan_search import plan_search
    from hydra_tune.coordinator.spec import read_spec
    from hydra_tune.core.errors import SpecError

    if trials < 1:
        raise SpecError(f"trials cannot be {trials}", "give how many candidates to look at, 1 or more")
    flags |= {"epochs": epochs, "data": data}
    if not spec.endswith((".yaml", ".yml")):
        flags["trials"] = trials  # a build function alone does not give their number
    found = plan_search(read_spec(spec, flags), trials)
    if as_json:
        _print_json(found)
    else:
        _print(found)
    return 0


def _print(found: SearchPlan) -> None:
    from hydra_tune.cli.tables import short_params
    from hydra_tune.core.errors import printable

    for trial in found.trials:
        typer.echo(printable(f"candidate {trial.number}: {short_params(trial.params)}"))
        if trial.choice is None:
            typer.echo(printable(f"  cannot be trained: {trial.refused}"))
        else:
            print_options(trial.choice.stored())
    typer.echo(_ahead(found))


def print_options(choice: dict[str, Any]) -> None:
    """Print the considered strategies, with the chosen one marked, and the reason."""
    from hydra_tune.cli.tables import print_table
    from hydra_tune.core.devices import format_bytes
    from hydra_tune.core.errors import printable
    from hydra_tune.core.tables import Table

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
    """Return the expected time of the whole search and the ways to make it faster."""
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


def _compared(other: SearchTime, now: SearchTime) -> str:
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

    def ahead(one: SearchTime) -> dict[str, Any]:
        return {"devices": one.pool.devices, "device_memory": one.pool.memory, "makespan_seconds": one.makespan,
                "lower_bound_seconds": one.bound, "infeasible": one.infeasible}  # fmt: skip

    print_json({
        "trials": found.total, "candidates": [trial(one) for one in found.trials], "search": ahead(found.now),
        "one_more_device": ahead(found.one_more_device), "twice_the_memory": ahead(found.twice_the_memory),
    })  # fmt: skip
