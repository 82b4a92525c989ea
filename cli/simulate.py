"""`hydra-tune simulate`: simulates a scheduling policy for many trials on many devices."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from hydra_tune.cli.options import Json

if TYPE_CHECKING:
    from hydra_tune.engine.scenario import Scenario, ScenarioOutcome


def simulate(
    trials: Annotated[int, typer.Option(help="Number of trials.")] = 64,
    devices: Annotated[int, typer.Option(help="Number of devices; with --nodes, on each node.")] = 8,
    nodes: Annotated[int, typer.Option(help="Number of nodes; a trial stays on the one where it began.")] = 1,
    concurrency: Annotated[int | None, typer.Option(help="Trials in flight; default one more than devices.")] = None,
    policy: Annotated[str, typer.Option(help="lazy-lrtf, lrtf, srtf, fifo, fair or random.")] = "lazy-lrtf",
    units: Annotated[int, typer.Option(help="Mean number of units per trial.")] = 60,
    unit_seconds: Annotated[float, typer.Option(help="Longest unit in seconds; about 1 in a search.")] = 1,
    spread: Annotated[
        float, typer.Option(help="Sigma of the lognormal trial lengths; 0 makes all trials equal.")
    ] = 0.5,
    state_bytes: Annotated[
        str | None, typer.Option(help="Size of a trial's state, such as 1GiB; without it moves are free.")
    ] = None,
    device_memory: Annotated[str | None, typer.Option(help="Memory of each device; default unlimited.")] = None,
    bandwidth: Annotated[str, typer.Option(help="Bytes that a device moves per second.")] = "4GiB",
    slack: Annotated[
        float | None,
        typer.Option(help="Remaining seconds by which another trial must lead before lazy-lrtf switches."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the trial lengths and of the random policy.")] = 0,
    as_json: Json = False,
) -> None:
    """Run the scheduler on a virtual clock: makespan, distance to the lower bound, utilisation, moves.

    1,000 devices and 10,000 trials (600,000 units) take 5 to 8 s on one core.
    """
    from hydra_tune.cli.tables import print_json
    from hydra_tune.engine.scenario import Scenario
    from hydra_tune.engine.simulator import simulate as run

    scenario = Scenario(
        trials=trials, devices=devices, nodes=nodes, concurrency=concurrency, policy=policy, units=units, spread=spread,
        unit_seconds=unit_seconds, state_bytes=_size("state_bytes", state_bytes) or 0, slack=slack, seed=seed,
        device_memory=_size("device_memory", device_memory), bandwidth=_size("bandwidth", bandwidth) or 0,
    )  # fmt: skip
    outcome = run(scenario)
    one_pool = run(_one_pool(scenario)) if nodes > 1 else None
    if as_json:
        more = {} if one_pool is None else {"vs_one_pool": outcome.makespan / one_pool.makespan}
        print_json({"scenario": scenario, **vars(outcome), **more})
    else:
        _print(scenario, outcome, one_pool)


def _one_pool(scenario: Scenario) -> Scenario:
    """Return the scenario with the devices of all nodes on one."""
    in_flight = None if scenario.concurrency is None else scenario.concurrency * scenario.nodes
    return replace(scenario, nodes=1, devices=scenario.devices * scenario.nodes, concurrency=in_flight)


def _size(name: str, text: str | None) -> int | None:
    """Return a size in bytes; the error message names the flag."""
    from hydra_tune.core.devices import parse_memory
    from hydra_tune.core.errors import SpecError, quoted

    try:
        return None if text is None else parse_memory(text)
    except SpecError as error:
        raise SpecError(f"{name} cannot be {quoted(text)}", error.hint) from error


def _print(scenario: Scenario, outcome: ScenarioOutcome, one_pool: ScenarioOutcome | None) -> None:
    from hydra_tune.core.devices import format_bytes

    devices = scenario.devices * scenario.nodes
    lines = {
        "units": f"{outcome.units:,} of {scenario.trials:,} trials on {devices:,} devices, {scenario.policy}",
        "makespan": f"{outcome.makespan:,.1f} s",
        "lower bound": f"{outcome.lower_bound:,.1f} s; the makespan is {outcome.makespan_vs_bound:.4f} of it",
        "utilisation": f"{outcome.utilization:.1%}",
        "same-model residency": f"{outcome.same_model_residency:.1%} of units; {outcome.switches:,} switches",
        "moved": format_bytes(outcome.moved_bytes),
    }
    if one_pool is not None:
        ratio = outcome.makespan / one_pool.makespan
        lines["nodes"] = f"{scenario.nodes:,}; the makespan is {ratio:.4f} of that of one pool of all devices"
    for name, text in lines.items():
        typer.echo(f"{name}: {text}")
