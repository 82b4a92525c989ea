"""Shared by `search` and `resume`: runs a prepared search and prints its results."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from hydra_tune.cli.options import program
from hydra_tune.core.errors import printable

if TYPE_CHECKING:
    from hydra_tune.coordinator.spec import SearchSpec
    from hydra_tune.storage.queries import TrialRecord


def _print_reasons(trials: Sequence[TrialRecord]) -> None:
    """Print the number of trials that each strategy trained, with the recorded reason for the first."""
    reasons: dict[str, list[str]] = {}
    for trial in trials:
        choice = (trial.plan or {}).get("choice")
        if choice is not None and trial.strategy:
            reasons.setdefault(trial.strategy, []).append(f"trial {trial.number}: {choice['because']}")
    for strategy, found in reasons.items():
        typer.echo(printable(f"{strategy} trained {len(found)} trial{'s' if len(found) > 1 else ''} ({found[0]})"))


def run_and_print(ready: SearchSpec, *, storage: str | None, as_json: bool) -> int:
    """Run the search and return the exit code. `storage` is the user's argument, for suggested commands."""
    from hydra_tune.cli.tables import leaderboard, print_json, print_table
    from hydra_tune.coordinator.search import run_search
    from hydra_tune.coordinator.trust import trust_flags
    from hydra_tune.storage.database import masked

    settings = ready.settings
    name = shlex.quote(settings.study)
    shown = masked(storage) if storage else ""
    # A URL with a password is not printed, and one with *** could not be used.
    place = "" if not storage else f" --storage {shlex.quote(shown)}" if shown == storage else ' --storage "$URL"'
    trust = trust_flags(ready.source.describe())
    cluster = f" --cluster {settings.cluster}" if settings.cluster else ""
    resume = f"{program()} resume {name}{place}{cluster}{trust}"
    try:
        result = run_search(ready.source, settings, space=ready.space, again=resume)
    except KeyboardInterrupt:
        print(f"interrupted; nothing is lost. Go on with: {resume}", file=sys.stderr)
        return 130
    try:
        best = result.best_trial if result.has_best else None
        if as_json:
            found = {"study": settings.study, "storage": masked(settings.storage), "best": best}
            print_json({**found, "trials": result.trials})
        else:
            metrics = result.metrics or settings.metrics
            print_table(leaderboard(result.trials, metrics, settings.directions))
            _print_reasons(result.trials)
            if best is None:
                typer.echo("no completed trial satisfies its constraints")
            number = f" {best.number}" if best is not None else ""
            typer.echo(f"details:      {program()} show {name}{number}{place}")
            if best is not None and (result.has_weights(best.number) or result.files(best.number)):
                typer.echo(f"export:       {program()} export {name} --to model{place}{trust}")
            typer.echo(f"in a browser: {program()} dashboard{place}")
    finally:
        result.close()
    return 0
