"""Schema versions: creates missing tables, refuses newer ones, upgrades on request.

A database holds two families of tables. Optuna creates its own and records their version in `alembic_version`;
`migrations` creates ours and records the version in `hydra_alembic_version`. Opening an up-to-date database reads two
small tables and does not import Alembic.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import sqlalchemy
from optuna.storages import RDBStorage
from sqlalchemy import Connection, Engine, NullPool

from hydra_tune.core.errors import StorageError
from hydra_tune.storage.database import (
    BUSY_SECONDS,
    address,
    alone_in,
    explaining,
    masked,
    reading,
    sqlite_path,
    writing,
)
from hydra_tune.storage.tables import METADATA, TRIALS

VERSION_TABLE = "hydra_alembic_version"
VERSIONS = ("0001", "0002", "0003", "0004", "0005", "0006")
HEAD = VERSIONS[-1]

# Optuna's newest known schema. Others are not refused: Optuna itself then checks them, which is slow.
OPTUNA_HEAD = "v3.2.0.a"

# An arbitrary number that no other program is likely to lock on the same server.
_POSTGRESQL_LOCK = 0x48594452

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Versions:
    """Schema versions of a database; None if the tables do not exist."""

    optuna: str | None
    hydra: str | None


def read_versions(engine: Engine) -> Versions:
    """Read the versions of both families of tables."""
    with reading(engine) as connection:
        tables = set(sqlalchemy.inspect(connection).get_table_names())
        optuna = _stamp(connection, "alembic_version") if {"alembic_version", "studies", "trials"} <= tables else None
        hydra = _stamp(connection, VERSION_TABLE) if VERSION_TABLE in tables else None
    return Versions(optuna, hydra)


def ensure_schema(engine: Engine) -> None:
    """Create missing tables; raise a StorageError if existing ones need another version of this program.

    Any number of processes may do this at once on one database.
    """
    found = read_versions(engine)
    if found == Versions(OPTUNA_HEAD, HEAD):
        return
    _refuse_other_versions(engine, found)
    with _alone(engine):
        _check_optuna_tables(engine)
        if read_versions(engine).hydra is None:
            run_migrations(engine)
            _log.info("created the tables of %s", masked(address(engine)))


def check_schema(engine: Engine) -> bool:
    """True if our tables exist; creates nothing. Raises a StorageError if Optuna's tables are missing."""
    found = read_versions(engine)
    if found.optuna is None:
        shown = masked(address(engine))
        raise StorageError(f"database {shown} holds no studies", "check the URL; a search makes the tables")
    _refuse_other_versions(engine, found)
    return found.hydra is not None


def upgrade(engine: Engine) -> Path | None:
    """Upgrade both families of tables; return the backup made beside a SQLite file.

    For a server None is returned: back its database up with its own tools (pg_dump, mariadb-dump).
    """
    found = read_versions(engine)
    if found.hydra is not None and found.hydra not in VERSIONS:
        _refuse_other_versions(engine, found)
    backup = _back_up(engine, found)
    with _alone(engine):
        with explaining(engine), _optuna_tables(engine, skip_compatibility_check=True) as tables:
            if tables.get_current_version() != tables.get_head_version():
                tables.upgrade()
        run_migrations(engine)
    return backup


def _stamp(connection: Connection, table: str) -> str | None:
    column: sqlalchemy.ColumnClause[str] = sqlalchemy.column("version_num")
    return connection.execute(sqlalchemy.select(column).select_from(sqlalchemy.table(table))).scalar()


def _refuse_other_versions(engine: Engine, found: Versions) -> None:
    shown = masked(address(engine))
    if found.hydra is None or found.hydra == HEAD:
        return
    if found.hydra in VERSIONS:
        raise StorageError(
            f"database {shown} has schema {found.hydra}, this Hydra Tune needs {HEAD}",
            "run `hydra-tune migrate`; it makes a backup first",
        )
    raise StorageError(
        f"database {shown} has schema {found.hydra}, newer than {HEAD}, the last that this Hydra Tune knows",
        "upgrade: pip install -U hydra-tune",
    )


@contextmanager
def _alone(engine: Engine) -> Iterator[None]:
    """Let only one process at a time create tables: neither Optuna nor Alembic supports concurrent creation."""
    path = sqlite_path(engine)
    if path is not None:
        with alone_in(path.parent):
            yield
        return
    with engine.connect() as connection:
        func = sqlalchemy.func
        take, release = func.pg_advisory_lock(_POSTGRESQL_LOCK), func.pg_advisory_unlock(_POSTGRESQL_LOCK)
        if engine.dialect.name == "mysql":
            name = f"hydra_tune.{engine.url.database}"[:64]  # the server's locks are shared by its databases
            take, release = func.get_lock(name, BUSY_SECONDS), func.release_lock(name)
        connection.execute(sqlalchemy.select(take))
        try:
            yield
        finally:
            connection.execute(sqlalchemy.select(release))


@contextmanager
def _optuna_tables(engine: Engine, *, skip_compatibility_check: bool = False) -> Iterator[RDBStorage]:
    """Open Optuna's own storage, which creates and stamps its tables; close its connections at the end."""
    # Optuna treats the URL as a format string, so braces are doubled.
    url = address(engine).replace("{", "{{").replace("}", "}}")
    options = {"poolclass": NullPool}
    storage = RDBStorage(url, engine_kwargs=options, skip_compatibility_check=skip_compatibility_check)
    try:
        yield storage
    finally:
        storage.remove_session()
        storage.engine.dispose()


def _check_optuna_tables(engine: Engine) -> None:
    try:
        with explaining(engine), _optuna_tables(engine):
            return
    except RuntimeError as error:
        shown = masked(address(engine))
        raise StorageError(
            f"database {shown} was made by another version of Optuna: {error}",
            "run `hydra-tune migrate`; it makes a backup first",
        ) from error


def run_migrations(engine: Engine, to: str = "head") -> None:
    """Run our migrations up to a version, in one transaction; MySQL commits after each table all the same."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    with writing(engine) as connection:
        # One transaction for all migrations: a crash leaves either the old version or the new one.
        config.attributes["connection"] = connection
        command.upgrade(config, to)
        if connection.dialect.name == "mysql":
            _widen_columns(connection)


def _widen_columns(connection: Connection) -> None:
    """Let MySQL keep texts of more than 64 KiB, as a source or a traceback may be, and fractions of a second."""
    quoted = connection.dialect.identifier_preparer.quote
    for table in (*METADATA.tables.values(), TRIALS):
        for column in table.columns:
            wide = {sqlalchemy.Text: "MEDIUMTEXT", sqlalchemy.DateTime: "DATETIME(6)"}.get(type(column.type))
            if wide is not None:
                null = "NULL" if column.nullable else "NOT NULL"
                names = quoted(table.name), quoted(column.name)
                connection.exec_driver_sql("ALTER TABLE {} MODIFY {} {} {}".format(*names, wide, null))


def _back_up(engine: Engine, found: Versions) -> Path | None:
    path = sqlite_path(engine)
    if path is None:
        return None
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
    backup = path.with_name(f"{path.name}.{found.hydra or 'plain'}-{moment}.backup")
    # SQLite's backup is consistent even during writes; a plain file copy would miss the WAL file.
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(backup)) as target:
        source.backup(target)
    return backup
