"""`hydra-tune spaces`: the built-in model families and data sets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hydra_tune.cli.options import Json

if TYPE_CHECKING:
    from hydra_tune.search_spaces.dataset import Data


def spaces(
    family: Annotated[str | None, typer.Argument(help="A family, to see its parameters.")] = None,
    data: Annotated[str | None, typer.Option(help="The data set that the parameters are for.")] = None,
    as_json: Json = False,
) -> None:
    """List the built-in model families, or the parameters of one."""
    from hydra_tune.cli.tables import print_json, print_table
    from hydra_tune.core.tables import Table
    from hydra_tune.search_spaces.families import FAMILIES

    if family is not None:
        _show_family(family, data, as_json)
        return
    if as_json:
        print_json(
            {name: {"description": f.description, "tasks": f.tasks, "inputs": f.kinds} for name, f in FAMILIES.items()}
        )
        return
    table = Table(["family", "description", "tasks"])
    for name, chosen in FAMILIES.items():
        table.rows.append([name, chosen.description, ", ".join(chosen.tasks)])
    print_table(table)
    typer.echo("data sets: digits, breast_cancer, wine, diabetes, text, a .csv or .parquet file, or file.py:function")


def _show_family(name: str, data: str | None, as_json: bool) -> None:
    from hydra_tune.cli.tables import print_json, print_table
    from hydra_tune.core.tables import Table
    from hydra_tune.search_spaces.families import FamilyBuild, family

    chosen = family(name)
    if "table" in chosen.kinds:
        space = chosen.space(_table(data))
    else:
        space = FamilyBuild((chosen.name,), data or ("text" if "language" in chosen.tasks else "digits")).space
    rows = [(param.name, str(param.distribution), str(param.when or "")) for param in space.params]
    if as_json:
        print_json([{"name": n, "distribution": d, "when": w} for n, d, w in rows])
        return
    table = Table(["parameter", "distribution", "when"], rows=list(rows))
    print_table(table)


def _table(data: str | None) -> Data:
    """Load a table with its last column as the target, for the families that `fit` searches."""
    from sklearn.datasets import load_breast_cancer

    from hydra_tune.automl.prepared import prepare
    from hydra_tune.automl.reading import read_table

    table = read_table(load_breast_cancer(as_frame=True).frame if data is None else data)
    return prepare(table, table.columns[-1])[0].data()
