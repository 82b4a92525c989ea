"""`hydra-tune fit TABLE --target COLUMN`: from a table to a predictor."""

from __future__ import annotations

import os
import shlex
import sys
import time as clock
from pathlib import Path
from typing import Annotated, Any

import typer

from hydra_tune.cli.options import Json, Quiet, Storage, option, program


def fit(
    table: Annotated[str, typer.Argument(help="A .csv or .parquet file, or an .npz file of images.", metavar="TABLE")],
    target: Annotated[str, typer.Option(help="The column to predict, or the array in an .npz file.")],
    time: Annotated[str | None, typer.Option("--time", help="Time limit, such as 90s, 10m or 1h; default 5m.")] = None,
    trials: Annotated[int | None, typer.Option(help="Number of models to try, instead of a time limit.")] = None,
    to: Annotated[Path | None, typer.Option(help="Directory for the predictor; default TABLE-model.")] = None,
    task: Annotated[str | None, typer.Option(help="binary, multiclass or regression; inferred if not given.")] = None,
    metric: Annotated[str | None, typer.Option(help="Metric that ranks the models; default by the task.")] = None,
    folds: Annotated[int | None, typer.Option(help="Number of folds; 1 holds out a fifth; default by rows.")] = None,
    families: Annotated[list[str] | None, typer.Option(help="A model family to search; may be repeated.")] = None,
    refit: Annotated[bool, typer.Option("--refit", help="Train the chosen models again on all rows.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of the fit; drawn and recorded when not given.")] = None,
    study: Annotated[str | None, option("study")] = None,
    storage: Storage = None,
    devices: Annotated[str, option("devices")] = "auto",
    device_memory: Annotated[str | None, option("device_memory")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the fit in --to.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> int:
    """Fit a table: search model families, ensemble the best models, and write a predictor."""
    from hydra_tune.automl.state import free_directory

    place = to if to is not None else free_directory(table)
    again = (
        f"{program()} fit {shlex.quote(table)} --target {shlex.quote(target)} --to {shlex.quote(str(place))} --resume"
    )
    options: dict[str, Any] = {
        "time": time, "trials": trials, "task": task, "metric": metric, "folds": folds, "families": families,
        "refit": refit, "seed": seed, "study": study, "storage": storage, "devices": devices,
        "device_memory": device_memory, "resume": resume,
    }  # fmt: skip
    return fit_and_show(table, target, place, options, again=again, quiet=quiet, as_json=as_json)


def fit_and_show(
    table: str | None, target: str, to: Path, options: dict[str, Any], *, again: str, quiet: bool, as_json: bool
) -> int:
    """Fit, or continue a fit, print the result and return the exit code. `again` is the command to continue."""
    started = _seconds_since_start()
    from hydra_tune.automl.fit import fit as fit_table

    try:
        fit_table(table, target, to=to, progress=not quiet, spent=started, **options)
    except KeyboardInterrupt as error:
        print(f"{error or 'interrupted'}. Go on with: {again}", file=sys.stderr)
        return 130
    show_fit(to, as_json=as_json)
    return 0


def show_fit(directory: Path, *, as_json: bool) -> None:
    """Print the result of a fit and the next commands."""
    from hydra_tune.cli.leaderboard import print_leaderboard

    print_leaderboard(directory, as_json=as_json)
    if not as_json:
        shown = shlex.quote(str(directory))
        typer.echo(f"predict with it:  {program()} predict {shown} TABLE --to predictions.csv")


def _seconds_since_start() -> float:
    """Return the seconds since this process started: the time limit includes imports."""
    import psutil

    return max(0.0, clock.time() - float(psutil.Process(os.getpid()).create_time()))
