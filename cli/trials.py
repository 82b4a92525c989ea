"""`hydra-tune trials STUDY`: every trial of a study."""

from __future__ import annotations

from typing import Annotated

import typer

from hydra_tune.cli.options import Json, Storage, Study


def trials(
    study: Study,
    storage: Storage = None,
    best_first: Annotated[bool, typer.Option("--best-first", help="Order by value instead of by number.")] = False,
    as_json: Json = False,
) -> None:
    """List the trials of a study."""
    from hydra_tune.cli.tables import leaderboard, print_json, print_table, trials_table
    from hydra_tune.coordinator.settings import default_storage
    from hydra_tune.storage import open_storage
    from hydra_tune.storage.queries import study_summary, trial_records

    with open_storage(storage or default_storage(), read_only=True) as opened:
        summary = study_summary(opened, study)
        records = trial_records(opened, study)
    if as_json:
        print_json(records)
    elif best_first:
        print_table(leaderboard(records, summary.metrics, summary.directions, limit=None))
    else:
        print_table(trials_table(records, summary.metrics))
