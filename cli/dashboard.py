"""`hydra-tune dashboard`: studies, trials and devices in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hydra_tune.cli.options import Storage


def dashboard(
    storage: Storage = None,
    host: Annotated[str, typer.Option(help="Address to listen on; others than loopback need --token-file.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8080,
    token_file: Annotated[
        Path | None, typer.Option(help="Require the token in this file, which is created if missing.")
    ] = None,
    allow_actions: Annotated[
        bool, typer.Option("--allow-actions", help="Let visitors with the token stop, retry and add trials.")
    ] = False,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="Another name by which browsers may call this server.")
    ] = None,
    open: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> None:
    """Show studies, trials and devices in a browser."""
    from hydra_tune.coordinator.settings import default_storage
    from hydra_tune.dashboard.server import Options, serve

    serve(
        Options(
            url=storage or default_storage(), host=host, port=port, token_file=token_file,
            allow_actions=allow_actions, allowed_hosts=tuple(allowed_host or ()), open_browser=open,
        )
    )  # fmt: skip
