"""`hydra-tune leaderboard DIR`: the models of a fit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hydra_tune.cli.options import Json


def leaderboard(
    directory: Annotated[Path, typer.Argument(help="The directory of a fit.", metavar="DIR")],
    importance: Annotated[bool, typer.Option("--importance", help="Also print the importance of each column.")] = False,
    as_json: Json = False,
) -> None:
    """Show the models of a fit, best first: score on held-out rows, times, size, strategy, weight in the ensemble."""
    print_leaderboard(directory, importance=importance, as_json=as_json)


def print_leaderboard(directory: Path, *, importance: bool = False, as_json: bool) -> None:
    """Print the leaderboard as a table, or as one JSON document."""
    from hydra_tune.automl.predictor import Predictor
    from hydra_tune.cli.tables import number, print_json, print_table
    from hydra_tune.core.devices import format_bytes
    from hydra_tune.core.tables import Table

    predictor = Predictor(directory)
    columns = predictor.feature_importance() if importance else None
    if as_json:
        document = {
            "directory": str(directory), "task": predictor.task, "target": predictor.target,
            "metric": predictor.metric, "score": predictor.score, "study": predictor.study,
            "notes": predictor.description.notes, "models": predictor.description.leaderboard,
        }  # fmt: skip
        print_json({**document, **({} if columns is None else {"importance": columns})})
        return
    table = Table(["model", predictor.metric, "weight", "fit s", "ms/1000 rows", "size", "strategy"])
    table.numeric = frozenset({predictor.metric, "weight", "fit s", "ms/1000 rows", "size"})
    for entry in predictor.description.leaderboard:
        table.rows.append([
            entry.model, number(entry.score), f"{entry.weight:.3f}" if entry.weight else "",
            f"{entry.fit_seconds:.1f}", f"{1000 * entry.predict_seconds:.1f}", format_bytes(entry.size_bytes),
            entry.strategy,
        ])  # fmt: skip
    table.title = f"{predictor.task} of {predictor.target!r}, by {predictor.metric} on held-out rows"
    print_table(table)
    if columns is not None:
        worth = Table(["column", "importance", "spread"], numeric=frozenset({"importance", "spread"}))
        worth.title = f"loss of {predictor.metric} when a column is shuffled"
        worth.rows += [[each.column, number(each.importance), number(each.spread)] for each in columns]
        print_table(worth)
