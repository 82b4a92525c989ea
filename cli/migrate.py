"""`hydra-tune migrate`: bring a database to the newest schema, with a backup first."""

from __future__ import annotations

import typer

from hydra_tune.cli.options import Json, Storage


def migrate(storage: Storage = None, as_json: Json = False) -> None:
    """Upgrade the tables of a database; an SQLite file is backed up beside itself first."""
    from hydra_tune.cli.tables import print_json
    from hydra_tune.coordinator.settings import default_storage
    from hydra_tune.core.errors import StorageError
    from hydra_tune.storage.database import connect, masked, sqlite_path
    from hydra_tune.storage.schema import HEAD, OPTUNA_HEAD, Versions, read_versions, upgrade

    url = storage or default_storage()
    engine = connect(url)
    try:
        path = sqlite_path(engine)
        if path is not None and not path.exists():
            raise StorageError(f"database {masked(url)} does not exist", "a search creates it; check the path")
        before = read_versions(engine)
        current = before == Versions(OPTUNA_HEAD, HEAD)
        backup = None if current else upgrade(engine)
    finally:
        engine.dispose()
    if as_json:
        print_json({"storage": masked(url), "before": before.hydra, "after": HEAD, "backup": backup})
    elif current:
        typer.echo(f"{masked(url)} is up to date (schema {HEAD})")
    else:
        typer.echo(f"{masked(url)}: schema {before.hydra or 'none'} -> {HEAD}")
        typer.echo(f"the old file is {backup}" if backup else "a server's database is backed up with pg_dump")
