"""`hydra-tune studies`: the studies in a database."""

from __future__ import annotations

from hydra_tune.cli.options import Json, Storage


def studies(storage: Storage = None, as_json: Json = False) -> None:
    """List the studies of a database."""
    from hydra_tune.cli.tables import number, print_json, print_table
    from hydra_tune.coordinator.settings import default_storage
    from hydra_tune.core.tables import Table
    from hydra_tune.storage import open_storage
    from hydra_tune.storage.queries import list_studies

    with open_storage(storage or default_storage(), read_only=True) as opened:
        summaries = list_studies(opened)
    if as_json:
        print_json(summaries)
        return
    table = Table(
        ["study", "trials", "states", "metric", "best", "trial"],
        numeric=frozenset({"trials", "best", "trial"}),
    )
    for summary in summaries:
        states = ", ".join(f"{count} {state.lower()}" for state, count in summary.trials.items())
        objectives = ", ".join(f"{d} {m}" for m, d in zip(summary.metrics, summary.directions, strict=False))
        best = "" if summary.best_number is None else str(summary.best_number)
        table.rows.append(
            [
                summary.name,
                str(sum(summary.trials.values())),
                states,
                objectives,
                number(summary.best_value),
                best,
            ]
        )
    print_table(table)
