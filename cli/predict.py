"""`hydra-tune predict DIR TABLE`: predictions of a fitted model for new rows."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hydra_tune.cli.options import Json

if TYPE_CHECKING:
    import pandas as pd


def predict(
    directory: Annotated[Path, typer.Argument(help="The directory of a fit.", metavar="DIR")],
    table: Annotated[str, typer.Argument(help="A table with the columns that were fitted.", metavar="TABLE")],
    proba: Annotated[bool, typer.Option("--proba", help="Probabilities of the classes.")] = False,
    to: Annotated[Path | None, typer.Option(help="A .csv or .parquet file; default the terminal, as CSV.")] = None,
    model: Annotated[str | None, typer.Option(help="A model of the leaderboard, instead of the best.")] = None,
    evaluate: Annotated[bool, typer.Option("--evaluate", help="Print metrics; the table needs the target.")] = False,
    as_json: Json = False,
) -> None:
    """Predict the rows of a table, or evaluate the model on them."""
    from hydra_tune.automl.predictor import Predictor
    from hydra_tune.cli.tables import print_json

    _check_file(to)
    predictor = Predictor(directory)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always", UserWarning)
        if evaluate:
            found: Any = predictor.evaluate(table, model=model)
        else:
            found = (predictor.predict_proba if proba else predictor.predict)(table, model=model)
    for note in noted:
        print(f"warning: {note.message}", file=sys.stderr)
    if evaluate:
        _print_scores(found, as_json)
        return
    frame = found if proba else found.to_frame()
    frame.columns = [str(column) for column in frame.columns]
    if as_json:
        print_json(frame.to_dict(orient="list"))
    elif to is None:
        frame.to_csv(sys.stdout, index=False)
    else:
        _write(frame, to)
        typer.echo(f"{len(frame)} predictions: {to}")


def _print_scores(scores: dict[str, float], as_json: bool) -> None:
    from hydra_tune.cli.tables import number, print_json

    if as_json:
        print_json(scores)
        return
    for name, value in scores.items():
        typer.echo(f"{name}: {number(value)}")


def _check_file(to: Path | None) -> None:
    from hydra_tune.core.errors import SpecError, quoted

    if to is not None and to.suffix not in (".csv", ".parquet"):
        raise SpecError(f"predictions cannot go to {quoted(str(to))}", "give a .csv or .parquet file")


def inert_csv(frame: pd.DataFrame, to: Path) -> None:
    """Write a CSV file; escape classes and column names that a spreadsheet would run as formulas."""
    from hydra_tune.core.csv_cells import inert

    frame.map(inert).rename(columns=inert).to_csv(to, index=False)


def _write(frame: pd.DataFrame, to: Path) -> None:
    from hydra_tune.core.errors import InputError

    try:
        inert_csv(frame, to) if to.suffix == ".csv" else frame.to_parquet(to, index=False)
    except OSError as error:
        raise InputError(f"{to} cannot be written ({error.strerror})", "give another --to") from error
