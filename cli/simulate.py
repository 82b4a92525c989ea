"""`hydra-tune simulate`: what a scheduling policy would make of many trials on many devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hydra_tune.cli.options import Json

if TYPE_CHECKING:
    from hydra_tune.engine.scenario import Outcome, Scenario


def simulate(
    trials: Annotated[int, typer.Option(help="How many trials.")] = 64,
    devices: Annotated[int, typer.Option(help="How many devices.")] = 8,
    policy: Annotated[str, typer.Option(help="lazy-lrtf, lrtf, srtf, fifo, fair or random.")] = "lazy-lrtf",
    shards: Annotated[int, typer.Option(help="Shards of each trial.")] = 4,
    batches: Annotated[int, typer.Option(help="Batches of each trial: 2 * shards - 1 units each.")] = 10,
    unit_seconds: Annotated[
        float, typer.Option(help="A shard's forward in the mean; a backward takes twice that.")
    ] = 1,
    spread: Annotated[
        float, typer.Option(help="How much trials differ: sigma of a lognormal; 0 for not at all.")
    ] = 0.5,
    state_bytes: Annotated[
        str | None, typer.Option(help="State of each shard, such as 1GiB; else moving costs nothing.")
    ] = None,
    device_memory: Annotated[str | None, typer.Option(help="Memory of each device; else enough.")] = None,
    bandwidth: Annotated[str, typer.Option(help="What a device can move in a second.")] = "4GiB",
    double_buffering: Annotated[
        bool, typer.Option(help="Bring the next unit's shard in while a unit computes.")
    ] = True,
    slack: Annotated[
        float | None,
        typer.Option(help="Seconds another trial may be behind before lazy-lrtf switches; else 20 units."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the trials' sizes and the random policy.")] = 0,
    as_json: Json = False,
) -> None:
    """Run the scheduler on a virtual clock: makespan, distance to the lower bound, utilisation, moves.

    1,000 devices and 10,000 trials (700,000 units with the default shards and batches) take 8 to 20 s on one core.
    """
    from hydra_tune.cli.tables import print_json
    from hydra_tune.engine.scenario import Scenario
    from hydra_tune.engine.simulator import simulate as run

    scenario = Scenario(
        trials=trials, devices=devices, policy=policy, shards=shards, batches=batches, unit_seconds=unit_seconds,
        spread=spread, state_bytes=_size("state_bytes", state_bytes) or 0,
        device_memory=_size("device_memory", device_memory), bandwidth=_size("bandwidth", bandwidth) or 0,
        double_buffering=double_buffering, slack=slack, seed=seed,
    )  # fmt: skip
    outcome = run(scenario)
    if as_json:
        print_json({"scenario": scenario, **vars(outcome)})
    else:
        _print(scenario, outcome)


def _size(name: str, text: str | None) -> int | None:
    """A size in bytes; the complaint names the flag that it was given with."""
    from hydra_tune.devices import parse_memory
    from hydra_tune.errors import SpecError, quoted

    try:
        return None if text is None else parse_memory(text)
    except SpecError as error:
        raise SpecError(f"{name} cannot be {quoted(text)}", error.hint) from error


def _print(scenario: Scenario, outcome: Outcome) -> None:
    from hydra_tune.devices import format_bytes

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
