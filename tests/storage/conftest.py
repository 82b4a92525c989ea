"""Databases for the tests: a fresh SQLite file, and PostgreSQL and MariaDB servers that live as long as the session.

PostgreSQL refuses to run as root, so the servers are started as another user in a directory of their own; they
listen on a Unix socket there and nowhere else.
"""

import os
import pwd
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import optuna
import pytest
import sqlalchemy

from hydra_tune.storage import HydraStorage, open_storage
from tests.fault.searches import wait_for


@pytest.fixture(autouse=True)
def quiet_optuna() -> Iterator[None]:
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(before)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/studies.db"


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with its tables and nothing else: copying it is quicker than making it."""
    path = tmp_path_factory.mktemp("template") / "template.db"
    open_storage(f"sqlite:///{path}").close()
    return path


@pytest.fixture
def sqlite_storage(sqlite_template: Path, sqlite_url: str) -> Iterator[HydraStorage]:
    shutil.copy(sqlite_template, sqlite_url.removeprefix("sqlite:///"))
    with open_storage(sqlite_url) as storage:
        yield storage


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[str]:
    """The URL of a running server, up to the database's name."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if not programs:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    folder = Path(tempfile.mkdtemp(prefix="hydra-pg-", dir="/tmp"))
    user = _unprivileged_user()
    try:
        if user is not None:
            os.chown(folder, user.pw_uid, user.pw_gid)
        yield from _run_server(programs[-1].parent, folder, user)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgresql_admin(postgresql_server: str) -> Iterator[sqlalchemy.Engine]:
    url = postgresql_server.format("postgres").replace("postgresql:", "postgresql+psycopg:")
    admin = sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT", pool_pre_ping=True)
    yield admin
    admin.dispose()


@pytest.fixture(scope="session")
def postgresql_template(postgresql_admin: sqlalchemy.Engine, postgresql_server: str) -> str:
    """The name of a database with its tables and nothing else."""
    with postgresql_admin.connect() as connection:
        connection.exec_driver_sql("CREATE DATABASE with_tables")
    open_storage(postgresql_server.format("with_tables")).close()
    return "with_tables"


@pytest.fixture
def postgresql_url(postgresql_admin: sqlalchemy.Engine, postgresql_server: str) -> Iterator[str]:
    """The URL of an empty database."""
    with _database(postgresql_admin, template="template1") as name:
        yield postgresql_server.format(name)


@pytest.fixture
def postgresql_storage(
    postgresql_admin: sqlalchemy.Engine, postgresql_server: str, postgresql_template: str
) -> Iterator[HydraStorage]:
    with (
        _database(postgresql_admin, postgresql_template) as name,
        open_storage(postgresql_server.format(name)) as storage,
    ):
        yield storage


@contextmanager
def _database(admin: sqlalchemy.Engine, template: str) -> Iterator[str]:
    name = f"test_{uuid.uuid4().hex}"
    with admin.connect() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name} TEMPLATE {template}")
    yield name
    with admin.connect() as connection:
        # Without FORCE: a storage that a test left open fails here.
        connection.exec_driver_sql(f"DROP DATABASE {name}")


def _unprivileged_user() -> pwd.struct_passwd | None:
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name)
    pytest.skip("PostgreSQL refuses to run as root, and there is no user `postgres` or `nobody`")


def _run_server(programs: Path, folder: Path, user: pwd.struct_passwd | None) -> Iterator[str]:
    identity = {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    data, log = folder / "data", folder / "log"

    def run(*command: str) -> None:
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL, **identity)

    run(str(programs / "initdb"), "-D", str(data), "-U", "tester", "-A", "trust", "-E", "UTF8", "--no-sync")
    control = [str(programs / "pg_ctl"), "-D", str(data), "-w", "-s"]
    # The tests are about what is committed, not about power cuts.
    options = f"-c listen_addresses='' -c unix_socket_directories='{folder}' -c fsync=off"
    run(*control, "-l", str(log), "-o", options, "start")
    try:
        yield f"postgresql://tester@/{{}}?host={quote(str(folder))}"
    finally:
        run(*control, "-m", "fast", "stop")


@pytest.fixture(params=["sqlite_storage", "postgresql_storage"])
def storage(request: pytest.FixtureRequest) -> HydraStorage:
    """An SQLite file, then a database on a PostgreSQL server."""
    found: HydraStorage = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[str]:
    """The URL of a running MariaDB server, up to the database's name."""
    server, installer = (shutil.which(name, path="/usr/sbin:/usr/bin") for name in ("mariadbd", "mariadb-install-db"))
    if server is None or installer is None:
        pytest.skip("MariaDB is not installed: apt-get install mariadb-server")
    folder = Path(tempfile.mkdtemp(prefix="hydra-my-", dir="/tmp"))
    user = _unprivileged_user()
    try:
        if user is not None:
            os.chown(folder, user.pw_uid, user.pw_gid)
        yield from _run_mariadb(server, installer, folder, user)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_mariadb(server: str, installer: str, folder: Path, user: pwd.struct_passwd | None) -> Iterator[str]:
    identity = {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    place = [f"--datadir={folder}/data", "--no-defaults"]
    subprocess.run(
        [installer, "--no-defaults", place[0], "--auth-root-authentication-method=normal", "--skip-test-db"],
        check=True, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **identity,
    )  # fmt: skip
    url = f"mysql://root@localhost/{{}}?unix_socket={quote(str(folder))}/socket"
    with (folder / "log").open("wb") as log:
        # As with PostgreSQL: the tests are about what is committed, not about power cuts.
        process = subprocess.Popen(
            [server, "--no-defaults", place[0], f"--socket={folder}/socket", f"--pid-file={folder}/pid",
             "--skip-networking", "--innodb-flush-log-at-trx-commit=0", "--skip-log-bin"],
            cwd=folder, stdout=log, stderr=log, **identity,
        )  # fmt: skip
        try:
            wait_for((folder / "socket").exists, "MariaDB's socket")
            yield url
        finally:
            process.terminate()
            process.wait()


@pytest.fixture
def mariadb_url(mariadb_server: str) -> Iterator[str]:
    """The URL of an empty database."""
    admin = sqlalchemy.create_engine(mariadb_server.format("mysql").replace("mysql:", "mysql+pymysql:"))
    name = f"test_{uuid.uuid4().hex}"
    with admin.begin() as connection:
        connection.exec_driver_sql(f"CREATE DATABASE {name} CHARACTER SET utf8mb4 COLLATE utf8mb4_bin")
    yield mariadb_server.format(name)
    with admin.begin() as connection:
        connection.exec_driver_sql(f"DROP DATABASE {name}")
    admin.dispose()


@pytest.fixture(scope="session")
def mariadb_tables(mariadb_server: str) -> str:
    """The URL of a database with its tables, which take MariaDB seconds to make."""
    admin = sqlalchemy.create_engine(mariadb_server.format("mysql").replace("mysql:", "mysql+pymysql:"))
    with admin.begin() as connection:
        connection.exec_driver_sql("CREATE DATABASE with_tables CHARACTER SET utf8mb4 COLLATE utf8mb4_bin")
    admin.dispose()
    open_storage(mariadb_server.format("with_tables")).close()
    return mariadb_server.format("with_tables")


@pytest.fixture
def mariadb_storage(mariadb_tables: str) -> Iterator[HydraStorage]:
    """A database with its tables and, again after the test, no study."""
    with open_storage(mariadb_tables) as storage:
        yield storage
    with open_storage(mariadb_tables) as storage:
        for study in storage.get_all_studies():
            storage.delete_study(study._study_id)
