"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Storage = Annotated[
    str | None,
    typer.Option(help="Database URL; else $HYDRA_TUNE_STORAGE, else sqlite:///hydra_tune.db.", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")]
Study = Annotated[str, typer.Argument(help="Name of the study.")]
