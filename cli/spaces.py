"""`hydra-tune spaces`: the built-in model families and data sets."""

from __future__ import annotations

from typing import Annotated

import typer

from hydra_tune.cli.options import Json


def spaces(
    family: Annotated[str | None, typer.Argument(help="A family, to see its parameters.")] = None,
    data: Annotated[str | None, typer.Option(help="The data set that the parameters are for.")] = None,
    as_json: Json = False,
) -> None:
    """List the built-in model families, or the parameters of one."""
    from hydra_tune.cli.tables import Table, print_json, print_table
    from hydra_tune.search_spaces.families import FAMILIES

    if family is not None:
        _show_family(family, data, as_json)
        return
    if as_json:
        print_json(
            {name: {"description": f.description, "tasks": f.tasks, "inputs": f.kinds} for name, f in FAMILIES.items()}
        )
        return
    table = Table(["family", "what it is", "tasks"])
    for name, chosen in FAMILIES.items():
        table.rows.append([name, chosen.description, ", ".join(chosen.tasks)])
    print_table(table)
    typer.echo("data sets: digits, breast_cancer, wine, diabetes, text, a .csv or .parquet file, or file.py:function")


def _show_family(name: str, data: str | None, as_json: bool) -> None:
    from hydra_tune.cli.tables import Table, print_json, print_table
    from hydra_tune.search_spaces.families import FamilyBuild, family

    chosen = family(name)
    build = FamilyBuild(families=(chosen.name,), data=data or ("text" if "language" in chosen.tasks else "digits"))
    rows = [(param.name, str(param.distribution), str(param.when or "")) for param in build.space.params]
    if as_json:
        print_json([{"name": n, "distribution": d, "when": w} for n, d, w in rows])
        return
    table = Table(["parameter", "distribution", "when"], rows=list(rows))
    print_table(table)
