"""`hydra-tune report STUDY --to FILE`: the dashboard's pages of one study in one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hydra_tune.cli.options import Storage, Study


def report(
    study: Study,
    to: Annotated[Path, typer.Option(help="The HTML file to write.")],
    storage: Storage = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write one HTML file with the charts of a study, to be opened without a server."""
    from hydra_tune.coordinator.settings import default_storage
    from hydra_tune.core.errors import InputError, quoted
    from hydra_tune.dashboard.server import MISSING

    shown = quoted(str(to), limit=200)
    if to.exists() and not force:
        raise InputError(f"file {shown} exists already", "give another one, or --force")
    try:
        from hydra_tune.dashboard.report import write_report
    except ModuleNotFoundError as error:
        raise InputError(f"reports need {error.name}, which is not installed", MISSING) from error
    html = write_report(storage or default_storage(), study)
    try:
        to.write_text(html, encoding="utf-8")
    except OSError as error:
        raise InputError(f"file {shown} cannot be written ({error.strerror})", "give another one") from error
    typer.echo(f"{to} ({len(html) / 2**20:.1f} MiB)")
