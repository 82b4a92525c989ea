"""Tables and their versions: created once by any process, refused when too new, upgraded with a backup."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import optuna
import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from hydra_tune.cli.app import run
from hydra_tune.core.errors import StorageError
from hydra_tune.storage import HydraStorage, open_storage, schema
from hydra_tune.storage.database import connect
from hydra_tune.storage.tables import METADATA


def set_version(url: str, version: str) -> None:
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection, connection:
        connection.execute(f"UPDATE {schema.VERSION_TABLE} SET version_num = ?", (version,))


def differences(storage: HydraStorage) -> list[object]:
    """Return the changes by which Alembic would bring the database to the form in tables.py."""

    def ours(name: str | None, kind: str, _parents: object) -> bool:
        return kind != "table" or name in METADATA.tables

    with storage.reading() as connection:
        options = {"include_name": ours, "compare_type": True, "version_table": schema.VERSION_TABLE}
        return list(compare_metadata(MigrationContext.configure(connection, opts=options), METADATA))


def test_the_migrations_make_the_tables_of_the_code(sqlite_storage: HydraStorage):
    assert differences(sqlite_storage) == []
    with sqlite_storage.reading() as connection:
        connection.exec_driver_sql("SELECT 1").scalar()
        names = set(sqlalchemy.inspect(connection).get_table_names())
    assert set(METADATA.tables) <= names


def test_the_migrations_make_the_tables_of_the_code_on_postgresql(postgresql_storage: HydraStorage):
    assert differences(postgresql_storage) == []


def test_a_difference_would_be_noticed(sqlite_storage: HydraStorage):
    with closing(sqlite3.connect(sqlite_storage.url.removeprefix("sqlite:///"))) as connection, connection:
        connection.execute("ALTER TABLE hydra_units DROP COLUMN seconds")
        connection.execute("DROP INDEX ix_hydra_attempts_trial")
    assert len(differences(sqlite_storage)) == 2


def test_the_known_versions_are_the_steps():
    config = Config()
    config.set_main_option("script_location", str(Path(schema.__file__).parent / "migrations"))
    steps = [step.revision for step in ScriptDirectory.from_config(config).walk_revisions()]
    assert steps[::-1] == list(schema.VERSIONS)


def test_optuna_stamps_its_own_tables(sqlite_storage: HydraStorage):
    engine = connect(sqlite_storage.url)
    assert schema.read_versions(engine) == schema.Versions(schema.OPTUNA_HEAD, schema.HEAD)
    engine.dispose()
    plain = optuna.storages.RDBStorage(sqlite_storage.url)  # It would refuse tables of another version.
    assert plain.get_current_version() == plain.get_head_version()
    plain.remove_session()
    plain.engine.dispose()


def test_an_up_to_date_database_opens_without_alembic(sqlite_storage: HydraStorage):
    program = (
        "import sys; from hydra_tune.storage import open_storage;"
        f"open_storage({sqlite_storage.url!r}).close(); print('alembic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


def test_importing_the_package_is_cheap():
    program = "import sys, hydra_tune.storage; print([m for m in ('optuna', 'sqlalchemy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize("read_only", [False, True])
def test_a_newer_schema_is_refused(sqlite_storage: HydraStorage, read_only: bool):
    set_version(sqlite_storage.url, "9999")
    with pytest.raises(StorageError, match=r"schema 9999, newer than 0006.*pip install -U hydra-tune"):
        open_storage(sqlite_storage.url, read_only)


def make_old_database(url: str) -> None:
    """A database as version 0001 made it, with a study in it."""
    plain = optuna.storages.RDBStorage(url)
    optuna.create_study(study_name="old", storage=plain).optimize(lambda trial: trial.suggest_float("x", 0, 1), 3)
    plain.remove_session()
    plain.engine.dispose()
    engine = connect(url)
    schema.run_migrations(engine, "0001")
    engine.dispose()


@pytest.mark.parametrize("read_only", [False, True])
def test_an_older_schema_asks_for_migrate(sqlite_url: str, read_only: bool):
    make_old_database(sqlite_url)
    with pytest.raises(StorageError, match=r"schema 0001, this Hydra Tune needs 0006 \(run `hydra-tune migrate`"):
        open_storage(sqlite_url, read_only)


def test_migrate_upgrades_an_older_database_with_a_backup(sqlite_url: str, capsys: pytest.CaptureFixture[str]):
    make_old_database(sqlite_url)
    assert run(["migrate", "--storage", sqlite_url]) == 0
    said = capsys.readouterr().out
    assert "schema 0001 -> 0006" in said
    (backup,) = Path(sqlite_url.removeprefix("sqlite:///")).parent.glob("*.backup")
    assert str(backup) in said
    with open_storage(sqlite_url) as storage:
        assert storage.get_n_trials(1) == 3
    engine = connect(f"sqlite:///{backup}")
    assert schema.read_versions(engine).hydra == "0001"
    engine.dispose()
    assert run(["migrate", "--storage", sqlite_url]) == 0
    assert "is up to date" in capsys.readouterr().out


def test_upgrade_refuses_a_newer_schema(sqlite_storage: HydraStorage):
    set_version(sqlite_storage.url, "9999")
    engine = connect(sqlite_storage.url)
    with pytest.raises(StorageError, match="9999"):
        schema.upgrade(engine)
    engine.dispose()


def test_upgrade_makes_a_backup_first(sqlite_url: str):
    plain = optuna.storages.RDBStorage(sqlite_url)
    optuna.create_study(study_name="old", storage=plain).optimize(lambda trial: trial.suggest_float("x", 0, 1), 3)
    plain.remove_session()
    plain.engine.dispose()
    engine = connect(sqlite_url)
    backup = schema.upgrade(engine)
    assert schema.read_versions(engine).hydra == schema.HEAD
    engine.dispose()

    assert backup is not None
    with open_storage(f"sqlite:///{backup}", read_only=True) as storage:
        assert storage.get_n_trials(1) == 3
        assert not storage.has_hydra_tables
    with open_storage(sqlite_url) as storage:
        assert storage.get_n_trials(1) == 3


def test_a_reader_opens_what_plain_optuna_made(sqlite_url: str):
    plain = optuna.storages.RDBStorage(sqlite_url)
    optuna.create_study(study_name="plain", storage=plain)
    with open_storage(sqlite_url, read_only=True) as storage:
        assert not storage.has_hydra_tables
        open_storage(sqlite_url).close()
        assert storage.has_hydra_tables
    plain.remove_session()
    plain.engine.dispose()


def test_a_reader_refuses_a_database_of_something_else(tmp_path: Path):
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE recipes (name)")
    with pytest.raises(StorageError, match="holds no studies"):
        open_storage(f"sqlite:///{path}", read_only=True)


@pytest.mark.parametrize("delete", ["ours", "optuna"])
def test_our_rows_go_with_their_study(sqlite_storage: HydraStorage, delete: str):
    check_deletion(sqlite_storage, delete)


@pytest.mark.parametrize("delete", ["ours", "optuna"])
def test_our_rows_go_with_their_study_on_postgresql(postgresql_storage: HydraStorage, delete: str):
    check_deletion(postgresql_storage, delete)


def check_deletion(storage: HydraStorage, delete: str) -> None:
    ids = [storage.create_new_study([optuna.study.StudyDirection.MINIMIZE], name) for name in ("stays", "goes")]
    for study_id in ids:
        storage.create_new_trial(study_id)
        for table in METADATA.sorted_tables:
            storage.add(table, a_row(table, study_id))
    if delete == "ours":
        storage.delete_study(ids[1])
    else:
        plain = optuna.storages.RDBStorage(storage.url)
        optuna.delete_study(study_name="goes", storage=plain)
        plain.remove_session()
        plain.engine.dispose()
    with storage.reading() as connection:
        for table in METADATA.sorted_tables:
            assert connection.execute(sqlalchemy.select(table.c.study_id)).scalars().all() == [ids[0]], table.name
    with pytest.raises(KeyError):
        storage.get_all_trials(ids[1])


def a_row(table: sqlalchemy.Table, study_id: int) -> dict[str, object]:
    """Return a row with a value for each required column."""
    row: dict[str, object] = {"study_id": study_id}
    for column in table.columns:
        if column.nullable or column.name in ("study_id", "unit_id", "created"):
            continue
        kind = column.type.python_type
        row[column.name] = schema.datetime.now() if kind is schema.datetime else kind(study_id)
    return row
