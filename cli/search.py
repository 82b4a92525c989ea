"""`hydra-tune search SPEC`: run a search and print its leaderboard."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from hydra_tune.cli.options import Json, Storage
from hydra_tune.cli.running import run_and_print


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
    spill: Annotated[str | None, typer.Option(help="Directory for what processes hand to each other.")] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="auto, any, search, whole, shard, pipeline, sparse, ist, elastic, or several to choose from; "
            "with options: '{name: pipeline, microbatches: 8}'."
        ),
    ] = None,
    sampler: Annotated[str | None, typer.Option(help="tpe, random, cmaes, gp, qmc, grid or nsgaii.")] = None,
    pruner: Annotated[str | None, typer.Option(help="none, median, asha, hyperband, percentile or share.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the study; drawn and recorded when not given.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which no trial is started.")] = None,
    stop_at_timeout: Annotated[
        bool, typer.Option("--stop-at-timeout", help="End running trials at the timeout with the epochs they have.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an existing study.")] = False,
    concurrency: Annotated[int | None, typer.Option(help="Trials in flight; default one a device.")] = None,
    keep_weights: Annotated[int | None, typer.Option(help="How many of the best trials keep their weights.")] = None,
    checkpoint_seconds: Annotated[float | None, typer.Option(help="How often running trials are checkpointed.")] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds without a sign of life until a trial is hung.")
    ] = None,
    allow_changes: Annotated[bool, typer.Option("--allow-changes", help="Resume with another build or space.")] = False,
    epochs: Annotated[int | None, typer.Option(help="Epochs of each candidate of a built-in family.")] = None,
    data: Annotated[str | None, typer.Option(help="Data set for built-in families.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: Json = False,
) -> int:
    """Run a search, or go on with one, and print what it found."""
    from hydra_tune.spec import read_spec, strategy_flag

    flags: dict[str, Any] = {
        "trials": trials, "metric": _one_or_all(metric), "direction": _one_or_all(direction), "study": study,
        "storage": storage, "devices": devices, "device_memory": device_memory, "spill": spill,
        "strategy": strategy_flag(strategy),
        "sampler": sampler, "pruner": pruner, "seed": seed, "timeout": timeout, "resume": resume or None,
        "stop_at_timeout": stop_at_timeout or None, "concurrency": concurrency, "keep_weights": keep_weights,
        "checkpoint_seconds": checkpoint_seconds, "deadline": deadline,
        "allow_changes": allow_changes or None, "epochs": epochs, "data": data,
        "progress": False if quiet else None,
    }  # fmt: skip
    return run_and_print(read_spec(spec, flags), storage=storage, as_json=as_json)


def _one_or_all(values: list[str] | None) -> str | list[str] | None:
    if not values:
        return None
    return values[0] if len(values) == 1 else values
