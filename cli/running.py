"""What `search` and `resume` share: running a search that is ready, and printing what it found."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from hydra_tune.cli.options import program
from hydra_tune.errors import printable

if TYPE_CHECKING:
    from hydra_tune.spec import SearchSpec
    from hydra_tune.storage.queries import TrialRecord


def _say_why(trials: Sequence[TrialRecord]) -> None:
    """How many trials each strategy trained, and the reason for the first of them, where reasons were noted."""
    reasons: dict[str, list[str]] = {}
    for trial in trials:
        choice = (trial.plan or {}).get("choice")
        if choice is not None and trial.strategy:
            reasons.setdefault(trial.strategy, []).append(f"trial {trial.number}: {choice['because']}")
    for strategy, found in reasons.items():
        typer.echo(printable(f"{strategy} trained {len(found)} trial{'s' if len(found) > 1 else ''} ({found[0]})"))


def run_and_print(ready: SearchSpec, *, storage: str | None, as_json: bool) -> int:
    """Run the search; the exit code. `storage` is what the user typed, for the commands that are suggested."""
    from hydra_tune.cli.tables import leaderboard, print_json, print_table
    from hydra_tune.coordinator import run_search
    from hydra_tune.storage.database import masked

    settings = ready.settings
    name = shlex.quote(settings.study)
    shown = masked(storage) if storage else ""
    # A URL with a password is not printed, and one with *** could not be typed.
    place = "" if not storage else f" --storage {shlex.quote(shown)}" if shown == storage else ' --storage "$URL"'
    resume = f"{program()} resume {name}{place}"
    try:
        result = run_search(ready.source, settings, space=ready.space, hint=f"if it is interrupted: {resume}")
    except KeyboardInterrupt:
        print(f"interrupted; nothing is lost. Go on with: {resume}", file=sys.stderr)
        return 130
    try:
        if as_json:
            found = {"study": settings.study, "storage": masked(settings.storage), "best": result.best_trial}
            print_json({**found, "trials": result.trials})
        else:
            print_table(leaderboard(result.trials, settings.metrics, settings.directions))
            _say_why(result.trials)
            typer.echo(f"look closer:   {program()} show {name} {result.best_trial.number}{place}")
            if result.has_weights(result.best_trial.number):
                typer.echo(f"take it home:  {program()} export {name} --to model{place}")
            typer.echo(f"in a browser:  {program()} dashboard{place}")
    finally:
        result.close()
    return 0
