"""`hydra-tune export STUDY --to DIR`: exports a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hydra_tune.cli.options import Json, Storage, Study, Trust


def export(
    study: Study,
    to: Annotated[Path, typer.Option(help="Directory to write to; made when missing.")],
    trial: Annotated[int | None, typer.Option(help="Number of a trial; default the best.")] = None,
    storage: Storage = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an earlier export.")] = False,
    trust: Trust = None,
    as_json: Json = False,
) -> None:
    """Write a trial's weights (safetensors), its record (JSON) and its program (torch.export); or what it kept."""
    from hydra_tune.cli.tables import print_json
    from hydra_tune.coordinator.export import export_trial
    from hydra_tune.coordinator.settings import default_storage

    exported = export_trial(storage or default_storage(), study, to, trial=trial, force=force, trusted=trust or ())
    if as_json:
        print_json(exported)
        return
    typer.echo(f"trial {exported.trial} of {study}: " + ", ".join(str(path) for path in exported.files))
    if exported.no_program_because:
        typer.echo(f"no program was written: {exported.no_program_because}")
