"""`hydra-tune resume STUDY`: go on with a study that was interrupted, or add trials to one that is done."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hydra_tune.cli.options import Json, Storage, Study
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
    from hydra_tune.cli.fit import resume_fit
    from hydra_tune.settings import default_storage
    from hydra_tune.spec import stored_spec

    given: dict[str, Any] = {
        "trials": trials, "devices": devices, "device_memory": device_memory, "timeout": timeout,
        "allow_changes": allow_changes or None, "progress": False if quiet else None,
    }  # fmt: skip
    flags = {name: value for name, value in given.items() if value is not None}
    ready = stored_spec(storage or default_storage(), study, flags)
    if isinstance(ready.source, FitSource):
        return resume_fit(
            Path(ready.source.directory), trials=trials, timeout=timeout, storage=storage, devices=devices,
            device_memory=device_memory, quiet=quiet, as_json=as_json,
        )  # fmt: skip
    return run_and_print(ready, storage=storage, as_json=as_json)
