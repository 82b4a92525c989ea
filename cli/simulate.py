"""`hydra-tune simulate`: simulates a scheduling policy for many trials on many devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hydra_tune.cli.options import Json

if TYPE_CHECKING:
    from hydra_tune.engine.scenario import Scenario, ScenarioOutcome


def simulate(
    trials: Annotated[int, typer.Option(help="How many trials.")] = 64,
    devices: Annotated[int, typer.Option(help="How many devices.")] = 8,
    concurrency: Annotated[int | None, typer.Option(help="Trials in flight; else one more than devices.")] = None,
    policy: Annotated[str, typer.Option(help="lazy-lrtf, lrtf, srtf, fifo, fair or random.")] = "lazy-lrtf",
    units: Annotated[int, typer.Option(help="Units of each trial, in the mean.")] = 60,
    unit_seconds: Annotated[float, typer.Option(help="What a unit takes at most; about 1 in a search.")] = 1,
    spread: Annotated[
        float, typer.Option(help="How much trials differ: sigma of a lognormal; 0 for not at all.")
    ] = 0.5,
    state_bytes: Annotated[
        str | None, typer.Option(help="State of each trial, such as 1GiB; else moving costs nothing.")
    ] = None,
    device_memory: Annotated[str | None, typer.Option(help="Memory of each device; else enough.")] = None,
    bandwidth: Annotated[str, typer.Option(help="What a device can move in a second.")] = "4GiB",
    slack: Annotated[
        float | None,
        typer.Option(help="Seconds another trial may be behind before lazy-lrtf switches; else as in a search."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the trials' sizes and the random policy.")] = 0,
    as_json: Json = False,
) -> None:
    """Run the scheduler on a virtual clock: makespan, distance to the lower bound, utilisation, moves.

    1,000 devices and 10,000 trials (600,000 units) take 5 to 8 s on one core.
    """
    from hydra_tune.cli.tables import print_json
    from hydra_tune.engine.scenario import Scenario
    from hydra_tune.engine.simulator import simulate as run

    scenario = Scenario(
        trials=trials, devices=devices, concurrency=concurrency, policy=policy, units=units, spread=spread,
        unit_seconds=unit_seconds, state_bytes=_size("state_bytes", state_bytes) or 0, slack=slack, seed=seed,
        device_memory=_size("device_memory", device_memory), bandwidth=_size("bandwidth", bandwidth) or 0,
    )  # fmt: skip
    outcome = run(scenario)
    if as_json:
        print_json({"scenario": scenario, **vars(outcome)})
    else:
        _print(scenario, outcome)


def _size(name: str, text: str | None) -> int | None:
    """Return a size in bytes; the error message names the flag."""
    from hydra_tune.core.devices import parse_memory
    from hydra_tune.core.errors import SpecError, quoted

    try:
        return None if text is None else parse_memory(text)
    except SpecError as error:
        raise SpecError(f"{name} cannot be {quoted(text)}", error.hint) from error


def _print(scenario: Scenario, outcome: ScenarioOutcome) -> None:
    from hydra_tune.core.devices import format_bytes

    lines = {
        "units": f"{outcome.units:,} of {scenario.trials:,} trials on {scenario.devices:,} devices, {scenario.policy}",
        "makespan": f"{outcome.makespan:,.1f} s",
        "lower bound": f"{outcome.lower_bound:,.1f} s; the makespan is {outcome.makespan_vs_bound:.4f} of it",
        "utilisation": f"{outcome.utilization:.1%}",
        "same-model residency": f"{outcome.same_model_residency:.1%} of units; {outcome.switches:,} switches",
        "moved": format_bytes(outcome.moved_bytes),
    }
    for name, text in lines.items():
        typer.echo(f"{name}: {text}")
