"""`hydra-tune search SPEC`: run a search and print its leaderboard."""

from __future__ import annotations

from typing import Any

from hydra_tune.cli.options import Data, Epochs, Json, Quiet, Spec, with_settings
from hydra_tune.cli.running import run_and_print


@with_settings()
def search(
    spec: Spec, *, epochs: Epochs = None, data: Data = None, quiet: Quiet = False, as_json: Json = False, **flags: Any
) -> int:
    """Run a search, or continue one, and print its leaderboard."""
    from hydra_tune.coordinator.spec import read_spec

    flags |= {"epochs": epochs, "data": data, "progress": False if quiet else None}
    return run_and_print(read_spec(spec, flags), storage=flags["storage"], as_json=as_json)
