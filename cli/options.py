"""Options that several commands share."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

Storage = Annotated[
    str | None,
    typer.Option(help="Database URL; else $HYDRA_TUNE_STORAGE, else sqlite:///hydra_tune.db.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")]
Study = Annotated[str, typer.Argument(help="Name of the study.")]


def program() -> str:
    """How the user started this command, so that what is printed can be typed: the name if it is on the PATH."""
    started = sys.argv[0]
    if shutil.which("hydra-tune") or Path(started).name != "hydra-tune":
        return "hydra-tune"
    return started
