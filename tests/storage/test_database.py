"""URLs, files and transactions: which are refused, what is masked, and who waits for whom."""

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from optuna.exceptions import StorageInternalError
from optuna.study import StudyDirection
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from hydra_tune.core.errors import StorageError
from hydra_tune.storage import HydraStorage, open_storage
from hydra_tune.storage.database import connect, explaining, masked, reading, writing


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "not a database URL"),
        ("studies.db", "not a database URL"),
        ("sqlite:/studies.db", "not a database URL"),
        ("postgresql://user@host:port/name", "not a database URL"),
        ("oracle://user:secret@host/name", "unsupported 'oracle'"),
        ("sqlite+aiosqlite:///studies.db", "unsupported 'sqlite+aiosqlite'"),
        ("nonsense://host/name", "unsupported 'nonsense'"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("sqlite:///studies.db?mode=ro", "parameters"),
        ("sqlite:///a\0b.db", "NUL"),
    ],
)
def test_a_bad_url_is_refused_in_one_line(url: str, said: str):
    with pytest.raises(StorageError) as caught:
        connect(url)
    text = str(caught.value)
    assert said in text
    assert "\n" not in text
    assert "\0" not in text
    assert "secret" not in text
    assert caught.value.hint


def test_a_missing_parent_is_named_and_not_made(tmp_path: Path):
    with pytest.raises(StorageError, match=r"absent' is no directory"):
        open_storage(f"sqlite:///{tmp_path}/absent/studies.db")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_no_database(tmp_path: Path):
    with pytest.raises(StorageError, match="is a directory"):
        open_storage(f"sqlite:///{tmp_path}")


@pytest.mark.parametrize("read_only", [False, True])
def test_a_file_that_is_no_database_stays_as_it_is(tmp_path: Path, read_only: bool):
    path = tmp_path / "notes.txt"
    path.write_text("dear diary, " * 100)
    with pytest.raises(StorageError, match="is not a SQLite database"):
        open_storage(f"sqlite:///{path}", read_only)
    assert path.read_text() == "dear diary, " * 100
    assert list(tmp_path.iterdir()) == [path]


def test_a_damaged_database_is_reported_in_one_line(tmp_path: Path):
    path = tmp_path / "studies.db"
    path.write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    with pytest.raises(StorageError, match=r"studies.db.*restore a backup") as caught:
        open_storage(f"sqlite:///{path}")
    assert "\n" not in str(caught.value)


def test_an_empty_file_becomes_a_database(tmp_path: Path):
    (tmp_path / "studies.db").touch()
    with open_storage(f"sqlite:///{tmp_path}/studies.db") as storage:
        assert storage.get_all_studies() == []


def test_a_reader_does_not_create_the_file(tmp_path: Path):
    with pytest.raises(StorageError, match=r"studies.db' does not exist \(a search creates it"):
        open_storage(f"sqlite:///{tmp_path}/studies.db", read_only=True)
    assert list(tmp_path.iterdir()) == []


def test_a_url_is_relative_to_the_folder_of_its_opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with open_storage("sqlite:///studies.db") as storage:
        monkeypatch.chdir("/")
        storage.close()
        assert storage.get_all_studies() == []
    assert (tmp_path / "studies.db").exists()


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("a b.db", "a b.db"),
        ("50%25.db", "50%.db"),
        ("what%3F.db", "what?.db"),
        ("{brace}.db", "{brace}.db"),
        ("ünï☃.db", "ünï☃.db"),
        ("a'b\"c.db", "a'b\"c.db"),
        ("a\nb.db", "a\nb.db"),
        ("#.db", "#.db"),
    ],
)
def test_hostile_file_names_are_names(tmp_path: Path, written: str, name: str):
    url = f"sqlite:///{tmp_path}/{written}"
    with open_storage(url) as storage:
        storage.create_new_study([StudyDirection.MINIMIZE], "s")
    with open_storage(storage.url, read_only=True) as storage:
        assert [study.study_name for study in storage.get_all_studies()] == ["s"]
    # A reader that ends last leaves SQLite's empty log beside the file.
    assert {path.name.removesuffix("-wal").removesuffix("-shm") for path in tmp_path.iterdir()} == {name}


@pytest.fixture
def read_only_directory(sqlite_template: Path) -> Iterator[Path]:
    """A directory with a database where this process may not write: root becomes nobody for a while."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(sqlite_template, folder / "studies.db")
        folder.chmod(0o555)
        (folder / "studies.db").chmod(0o444)
        root = os.getuid() == 0
        if root:
            os.setresuid(65534, 65534, 0)
        try:
            yield folder
        finally:
            if root:
                os.setresuid(0, 0, 0)
            folder.chmod(0o755)


def test_a_read_only_directory_is_refused_to_writers(read_only_directory: Path):
    before = sorted(read_only_directory.iterdir())
    with pytest.raises(StorageError, match="its directory is read-only"):
        open_storage(f"sqlite:///{read_only_directory}/new.db")
    with pytest.raises(StorageError, match="not accessible to you"):
        open_storage(f"sqlite:///{read_only_directory}/studies.db")
    assert sorted(read_only_directory.iterdir()) == before


def test_a_read_only_directory_serves_readers(read_only_directory: Path):
    with open_storage(f"sqlite:///{read_only_directory}/studies.db", read_only=True) as storage:
        assert storage.get_all_studies() == []


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:pa:s@s/w@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me@host/db?password=hush&a=b", "postgresql://me@host/db?password=***&a=b"),
        ("not a url://me:hush@host", "not a url://me:***@host"),
        ("sqlite:///a:b@c.db", "sqlite:///a:b@c.db"),
        ("sqlite:///a\nb", "sqlite:///a\\nb"),
    ],
)
def test_passwords_are_masked(url: str, shown: str):
    assert masked(url) == shown


def test_an_unreachable_server_is_told_without_its_password():
    with pytest.raises(StorageError, match="check that the server runs") as caught:
        connect("postgresql://me:hush@127.0.0.1:9/db?connect_timeout=2")
    assert "hush" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_driver_is_told_with_its_package():
    with pytest.raises(StorageError, match=r"pip install 'hydra-tune\[postgres\]'") as caught:
        connect("postgresql+psycopg2://me:hush@127.0.0.1:9/db")
    assert "hush" not in str(caught.value)


def test_a_missing_database_on_the_server_is_told(postgresql_server: str):
    with pytest.raises(StorageError, match="nowhere"):
        open_storage(postgresql_server.format("nowhere"))


def test_sqlite_is_durable_and_strict(sqlite_url: str):
    engine = connect(sqlite_url)
    with reading(engine) as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    engine.dispose()
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 60_000}


def another_connection(engine: Engine) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(engine.url.database or "", timeout=0, isolation_level=None))


def test_a_writer_holds_the_lock_from_its_first_moment_and_readers_go_on(sqlite_url: str):
    engine = connect(sqlite_url)
    with writing(engine) as connection:
        connection.exec_driver_sql("CREATE TABLE t (x)")
    with writing(engine):
        with another_connection(engine) as other, pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        with reading(engine) as reader:
            assert reader.exec_driver_sql("SELECT count(*) FROM t").scalar() == 0
    engine.dispose()


def test_a_reader_does_not_hold_the_write_lock(sqlite_url: str):
    engine = connect(sqlite_url)
    with reading(engine) as reader:
        reader.exec_driver_sql("SELECT 1 FROM sqlite_master").all()
        with another_connection(engine) as other:
            other.execute("BEGIN IMMEDIATE")
            other.execute("ROLLBACK")
    engine.dispose()


def test_a_failed_block_writes_nothing(sqlite_url: str):
    engine = connect(sqlite_url)
    with writing(engine) as connection:
        connection.exec_driver_sql("CREATE TABLE t (x UNIQUE)")
    with pytest.raises(StorageError, match="UNIQUE"), writing(engine) as connection:
        connection.exec_driver_sql("INSERT INTO t VALUES (1), (2), (1)")
    with reading(engine) as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM t").scalar() == 0
    engine.dispose()


def test_a_reader_cannot_write(sqlite_template: Path):
    engine = connect(f"sqlite:///{sqlite_template}", read_only=True)
    with pytest.raises(StorageError, match="readonly"), writing(engine) as connection:
        connection.exec_driver_sql("DELETE FROM studies")
    engine.dispose()


def test_a_reader_of_a_server_cannot_write(postgresql_storage: HydraStorage):
    engine = connect(postgresql_storage.url, read_only=True)
    with pytest.raises(StorageError, match="read-only"), writing(engine) as connection:
        connection.exec_driver_sql("DELETE FROM studies")
    engine.dispose()


def test_an_error_of_the_driver_within_optunas_code_is_one_line(tmp_path: Path) -> None:
    """Optuna wraps it in an error of its own while it looks at the version of its tables."""
    engine = connect(f"sqlite:///{tmp_path}/s.db")

    def look() -> None:
        try:
            raise OperationalError("BEGIN", None, sqlite3.OperationalError("disk I/O error"))
        except OperationalError as error:
            raise StorageInternalError("An exception is raised during the commit.") from error

    with pytest.raises(StorageError, match=r"s\.db: disk I/O error"), explaining(engine):
        look()
    engine.dispose()
