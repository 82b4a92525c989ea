"""`hydra-tune resume STUDY`: go on with a study that was interrupted, or add trials to one that is done."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from hydra_tune.cli.options import Json, Storage, Study, program
from hydra_tune.cli.running import run_and_print


def resume(
    study: Study,
    trials: Annotated[int | None, typer.Option(help="A new total of trials.")] = None,
    storage: Storage = None,
    devices: Annotated[str | None, typer.Option(help="Other devices than before.")] = None,
    device_memory: Annotated[str | None, typer.Option(help="Another budget of each device.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which no trial is started.")] = None,
    allow_changes: Annotated[bool, typer.Option("--allow-changes", help="Go on with another build or space.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: Json = False,
) -> int:
    """Go on with a study: finished trials stay, running ones go on from their checkpoints."""
    from hydra_tune.automl.build import FitSource
    from hydra_tune.cli.fit import fit_and_show
    from hydra_tune.settings import default_storage
    from hydra_tune.spec import stored_spec

    given: dict[str, Any] = {
        "trials": trials, "devices": devices, "device_memory": device_memory, "timeout": timeout,
        "allow_changes": allow_changes or None, "progress": False if quiet else None,
    }  # fmt: skip
    flags = {name: value for name, value in given.items() if value is not None}
    ready = stored_spec(storage or default_storage(), study, flags)
    if isinstance(ready.source, FitSource):
        again = f"{program()} resume {shlex.quote(study)}"
        options = {
            "trials": trials, "time": timeout, "storage": storage, "devices": devices or "auto",
            "device_memory": device_memory, "resume": True,
        }  # fmt: skip
        place = Path(ready.source.directory)
        return fit_and_show(None, "", place, options, again=again, quiet=quiet, as_json=as_json)
    return run_and_print(ready, storage=storage, as_json=as_json)
