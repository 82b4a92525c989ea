"""`hydra-tune search SPEC`: run a search and print its leaderboard."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated, Any

import typer

from hydra_tune.cli.options import Json, Storage, program


def search(
    spec: Annotated[str, typer.Argument(help="A YAML file, file.py:build, or package.module:build.", metavar="SPEC")],
    trials: Annotated[int | None, typer.Option(help="How many trials the study has in total.")] = None,
    metric: Annotated[
        list[str] | None, typer.Option(help="What is optimised; several times for several objectives.")
    ] = None,
    direction: Annotated[list[str] | None, typer.Option(help="minimize or maximize, for each metric.")] = None,
    study: Annotated[str | None, typer.Option(help="Name of the study; made up when not given.")] = None,
    storage: Storage = None,
    devices: Annotated[str | None, typer.Option(help="auto, 2xcpu, or cuda:0,cuda:1.")] = None,
    device_memory: Annotated[str | None, typer.Option(help="Budget of each device, such as 8GiB.")] = None,
    spill: Annotated[str | None, typer.Option(help="Directory for what does not fit on devices.")] = None,
    strategy: Annotated[str | None, typer.Option(help="How candidates are trained: auto or whole.")] = None,
    sampler: Annotated[str | None, typer.Option(help="tpe, random, cmaes, gp, qmc, grid or nsgaii.")] = None,
    pruner: Annotated[str | None, typer.Option(help="none, median, asha, hyperband or percentile.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the study; drawn and recorded when not given.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which no trial is started.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an existing study.")] = False,
    concurrency: Annotated[int | None, typer.Option(help="Trials in flight; default one a device.")] = None,
    keep_weights: Annotated[int | None, typer.Option(help="How many of the best trials keep their weights.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs of each candidate of a built-in family.")] = None,
    data: Annotated[str | None, typer.Option(help="Data set for built-in families.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: Json = False,
) -> int:
    """Run a search, or go on with one, and print what it found."""
    from hydra_tune.cli.tables import leaderboard, print_json, print_table
    from hydra_tune.coordinator import run_search
    from hydra_tune.spec import read_spec
    from hydra_tune.storage.database import masked

    flags: dict[str, Any] = {
        "trials": trials, "metric": _one_or_all(metric), "direction": _one_or_all(direction), "study": study,
        "storage": storage, "devices": devices, "device_memory": device_memory, "spill": spill, "strategy": strategy,
        "sampler": sampler, "pruner": pruner, "seed": seed, "timeout": timeout, "resume": resume or None,
        "concurrency": concurrency, "keep_weights": keep_weights, "epochs": epochs, "data": data,
        "progress": False if quiet else None,
    }  # fmt: skip
    ready = read_spec(spec, flags)
    settings = ready.settings
    place = f" --storage {shlex.quote(masked(storage))}" if storage else ""
    try:
        result = run_search(ready.source, settings, space=ready.space)
    except KeyboardInterrupt:
        again = f"{program()} search {shlex.quote(spec)} --study {shlex.quote(settings.study)} --resume{place}"
        print(f"interrupted; nothing that had ended is lost. Go on with: {again}", file=sys.stderr)
        return 130
    try:
        if as_json:
            found = {"study": settings.study, "storage": masked(settings.storage), "best": result.best_trial}
            print_json({**found, "trials": result.trials})
        else:
            print_table(leaderboard(result.trials, settings.metrics, settings.directions))
            name = shlex.quote(settings.study)
            typer.echo(f"look closer:   {program()} show {name} {result.best_trial.number}{place}")
            typer.echo(f"take it home:  {program()} export {name} --to model{place}")
    finally:
        result.close()
    return 0


def _one_or_all(values: list[str] | None) -> str | list[str] | None:
    if not values:
        return None
    return values[0] if len(values) == 1 else values
