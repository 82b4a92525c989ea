"""Database connections: from a URL to an engine, and the two kinds of transaction.

    connect(url)        an Engine for `sqlite:///FILE`, `postgresql://USER@HOST/NAME` or `mysql://USER@HOST/NAME`
    writing(engine)     a transaction that may write
    reading(engine)     a transaction that only reads, and never waits for a writer
    explaining(engine)  turns driver errors into a one-line StorageError
    masked(url)         the URL without passwords, for messages

Mistakes in a URL are found here and reported in one line, before anything is created. Tables and their versions are the
subject of `schema`.
"""

from __future__ import annotations

import os
import re
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote
from weakref import WeakKeyDictionary

import sqlalchemy
from optuna.exceptions import StorageInternalError
from sqlalchemy import URL, Connection, Engine, event
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    InterfaceError,
    NoSuchModuleError,
    OperationalError,
    SQLAlchemyError,
)

from hydra_tune.core.errors import DatabaseAway, StorageError, UnstorableError, printable, quoted

if sys.platform != "win32":
    import fcntl

# Commits take 0.2 ms: a writer that waits this many seconds faces a stuck process, not contention.
BUSY_SECONDS = 60
CONNECT_SECONDS = 10
READ_ONLY = "25006"
"""PostgreSQL's code for a write to a server that is read-only, such as a standby after a failover."""
SQLITE_HEADER = b"SQLite format 3\0"
EXAMPLES = "use sqlite:///FILE, or postgresql:// or mysql:// with USER:PASSWORD@HOST/NAME"
_READS = "hydra_reads"


def connect(url: str, *, read_only: bool = False) -> Engine:
    """Return an engine for `url`, or raise a StorageError. The first use of a SQLite file creates it."""
    parsed = _parse(url)
    if parsed.get_backend_name() == "sqlite":
        return _sqlite_engine(_sqlite_path(parsed), read_only)
    return _server_engine(parsed, read_only)


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """Open a transaction that may write. On SQLite it takes the write lock at once.

    A deferred transaction that reads first and writes later fails with "database is locked" as soon as another process
    has written in between, regardless of the timeout.
    """
    with explaining(engine), engine.begin() as connection:
        yield connection


@contextmanager
def reading(engine: Engine) -> Iterator[Connection]:
    """Open a read-only transaction: on SQLite a snapshot, which neither waits for writers nor blocks them."""
    with explaining(engine), engine.connect() as connection:
        connection = connection.execution_options(**{_READS: True})
        with connection.begin():
            yield connection


def masked(url: str) -> str:
    """Return `url`, well-formed or not, on one line with its passwords replaced by ***."""
    text = re.sub(r"://([^:/?#]*):.*@", r"://\1:***@", url, flags=re.DOTALL)
    text = re.sub(r"([?&][^=&]*password=)[^&]*", r"\1***", text, flags=re.IGNORECASE)
    return printable(text).replace("\n", "\\n")[:200]


def address(engine: Engine) -> str:
    """Return the engine's full URL with its password: for other libraries, never for a message."""
    return engine.url.render_as_string(hide_password=False)


def sqlite_path(engine: Engine) -> Path | None:
    """Return the file of a SQLite engine; None for a server."""
    return Path(str(engine.url.database)) if engine.dialect.name == "sqlite" else None


@contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Hold the directory's lock, so that only one process at a time sets up a new file.

    The lock is on the directory because a lock file would stay behind, and because closing any descriptor of the
    database file would drop SQLite's own locks on it. The kernel frees the lock when a process dies.
    """
    if sys.platform == "win32":  # Windows has no flock, so this race stays open there.
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _parse(url: str) -> URL:
    try:
        parsed = sqlalchemy.make_url(url)
        backend = parsed.get_backend_name()
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        raise StorageError(f"storage URL '{masked(url)}' is not a database URL", EXAMPLES) from error
    if backend == "postgresql" and parsed.drivername == "postgresql":
        # SQLAlchemy would default to psycopg2; the project installs psycopg 3.
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername in ("mysql", "mariadb", "mariadb+pymysql"):
        # PyMySQL serves both; a MariaDB server is recognised when it is asked for its version.
        return parsed.set(drivername="mysql+pymysql")
    if backend in ("postgresql", "mysql") or parsed.drivername in ("sqlite", "sqlite+pysqlite"):
        return parsed
    raise StorageError(f"storage URL '{masked(url)}' names the unsupported '{parsed.drivername}'", EXAMPLES)


def _sqlite_path(url: URL) -> Path:
    name = url.database or ""
    shown = masked(str(url))
    if name in ("", ":memory:") or name.startswith("file:"):
        raise StorageError(f"storage URL '{shown}' names no file", "use sqlite:///FILE; several processes read it")
    if "\0" in name or url.query:
        raise StorageError(f"storage URL '{shown}' has parameters or a NUL", "use sqlite:///FILE and nothing more")
    # Absolute, so that the file is found after a chdir or in a spawned process.
    return Path(name).absolute()


def _sqlite_engine(path: Path, read_only: bool) -> Engine:
    _check_sqlite_file(path, read_only)
    url = URL.create("sqlite", database=str(path))
    file = _SqliteFile(path, read_only)
    engine = sqlalchemy.create_engine(url, creator=file.open)
    _files[engine] = file

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        file.check()
        reads = connection.get_execution_options().get(_READS) or read_only
        connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


class _SqliteFile:
    """The file of an engine, and the check that it stays the same while the engine is used."""

    def __init__(self, path: Path, read_only: bool) -> None:
        self._path = path
        self._read_only = read_only
        self._first: os.stat_result | None = None

    def open(self) -> sqlite3.Connection:
        self.check()
        connection = _open_sqlite(self._path, self._read_only)
        if self._first is None and self._path.exists():
            self._first = self._path.stat()
        return connection

    def check(self) -> None:
        """Raise a StorageError if the file that was opened first is no longer at its path.

        SQLite would continue in the removed file, or make an empty one. A read-only engine may see the file replaced.
        """
        if self._first is None or self._read_only:
            return
        try:
            same = os.path.samestat(self._path.stat(), self._first)
        except FileNotFoundError:
            same = False
        if not same:
            shown = quoted(str(self._path), limit=200)
            raise StorageError(
                f"database {shown} was removed, renamed or replaced while it was in use", "put it back, then resume"
            )


_files: WeakKeyDictionary[Engine, _SqliteFile] = WeakKeyDictionary()
"""The file of each SQLite engine."""


def check_same_file(engine: Engine) -> None:
    """Raise a StorageError if a SQLite database is no longer at its path."""
    file = _files.get(engine)
    if file is not None:
        file.check()


def _check_sqlite_file(path: Path, read_only: bool) -> None:
    shown = quoted(str(path), limit=200)
    if path.is_dir():
        raise StorageError(f"database {shown} is a directory", "name a file in it")
    if not path.parent.is_dir():
        parent = quoted(str(path.parent), limit=200)
        raise StorageError(f"database {shown} cannot be made: {parent} is no directory", "create it first")
    if not path.exists():
        if read_only:
            raise StorageError(f"database {shown} does not exist", "a search creates it; check the path")
        if not os.access(path.parent, os.W_OK):
            raise StorageError(f"database {shown} cannot be made: its directory is read-only", "name another one")
        return
    needed = os.R_OK if read_only else os.R_OK | os.W_OK
    if not os.access(path, needed) or not (read_only or os.access(path.parent, os.W_OK)):
        raise StorageError(f"database {shown} or its directory is not accessible to you", "change the permissions")
    with path.open("rb") as file:
        header = file.read(len(SQLITE_HEADER))
    if header not in (b"", SQLITE_HEADER):
        raise StorageError(f"file {shown} is not a SQLite database", "name another file; this one is left as it is")


def _open_sqlite(path: Path, read_only: bool) -> sqlite3.Connection:
    location = f"file:{quote(str(path))}?mode={'ro' if read_only else 'rwc'}"
    if read_only and not os.access(path.parent, os.W_OK) and not Path(f"{path}-wal").exists():
        # Without a writer there is no WAL file, and a reader cannot create one in a read-only directory.
        location += "&immutable=1"
    # isolation_level=None disables implicit transactions: the "begin" event starts each one. The pool gives a
    # connection to one thread at a time, but not always to the same thread.
    connection = sqlite3.connect(
        location, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("PRAGMA foreign_keys=ON")
        # In WAL mode, synchronous=NORMAL may lose the last commits in a power cut.
        connection.execute("PRAGMA synchronous=FULL")
        if not read_only and connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            with alone_in(path.parent):
                connection.execute("PRAGMA journal_mode=WAL")
    except BaseException:
        connection.close()
        raise
    return connection


def _server_engine(url: URL, read_only: bool) -> Engine:
    arguments = {} if "connect_timeout" in url.query else {"connect_timeout": CONNECT_SECONDS}
    mysql = url.get_backend_name() == "mysql"
    # A statement of a transaction sees what was committed before it: PostgreSQL's default.
    options = {"isolation_level": "READ COMMITTED"} if mysql else {}
    try:
        engine = sqlalchemy.create_engine(url, pool_pre_ping=True, connect_args=arguments, **options)
    except (ModuleNotFoundError, NoSuchModuleError) as error:
        shown = masked(url.render_as_string())
        raise StorageError(
            f"storage URL '{shown}' needs a driver that is missing: {error}",
            "pip install 'hydra-tune[mysql]'" if mysql else "pip install 'hydra-tune[postgres]'",
        ) from error
    if read_only:

        @event.listens_for(engine, "begin")
        def begin(connection: Connection) -> None:
            connection.exec_driver_sql("SET TRANSACTION READ ONLY")

    try:
        with reading(engine):
            return engine
    except BaseException:
        engine.dispose()
        raise


@contextmanager
def explaining(engine: Engine) -> Iterator[None]:
    """Turn driver errors into a one-line StorageError with the database's name and a hint."""
    try:
        yield
    except SQLAlchemyError as error:
        raise _explained(error, engine) from error
    except StorageInternalError as error:  # Optuna's, around the driver's
        if not isinstance(error.__cause__, SQLAlchemyError):
            raise
        raise _explained(error.__cause__, engine) from error


def _explained(error: SQLAlchemyError, engine: Engine) -> StorageError:
    if isinstance(error, DataError):
        return UnstorableError(str(error.orig).strip().splitlines()[0], "give a value that the database can hold")
    cause = getattr(error, "orig", None) or error
    # PyMySQL's errors are a code and a text.
    text = str(cause.args[1]) if len(cause.args) == 2 and isinstance(cause.args[0], int) else str(cause)
    reason = (text.strip().splitlines() or [type(cause).__name__])[0]
    password = engine.url.password
    if password:
        reason = reason.replace(str(password), "***")
    hint = next((hint for symptom, hint in _HINTS.items() if symptom in reason), "run `hydra-tune doctor` on it")
    kind = DatabaseAway if _may_come_back(error, reason) else StorageError
    return kind(f"database {masked(address(engine))}: {reason}", hint)


def _may_come_back(error: SQLAlchemyError, reason: str) -> bool:
    """True for errors that end by themselves: a server that restarts or is read-only, a file that is locked."""
    if not isinstance(error, DBAPIError):
        return False
    if error.connection_invalidated or getattr(error.orig, "sqlstate", None) == READ_ONLY:
        return True
    if not isinstance(error, OperationalError | InterfaceError):
        return False
    on_sqlite = isinstance(error.orig, sqlite3.Error)
    return not on_sqlite or any(symptom in reason for symptom in ("is locked", "readonly", "unable to open"))


_HINTS = {
    "disk is full": "free some space and resume; what was committed is intact",
    "database is locked": f"another process held it for {BUSY_SECONDS} s; stop that one and try again",
    "not a database": "the file is damaged or no database; restore a backup",
    "malformed": "the file is damaged; restore a backup",
    "readonly database": "it was opened to read, or the permissions changed",
    "unable to open": "check the path and its permissions",
    "Can't connect": "check that the server runs, its address, and your user and password",
    "Unknown database": "check the database's name, or create it on the server",
    "connection": "check that the server runs, its address, and your user and password",
    "no such table": "the database has no studies yet; a search makes them",
    "does not exist": "check the database's name and that a search ran on it",
}
