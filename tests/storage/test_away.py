"""Databases that go away during a search: a server that restarts or refuses, a file that is moved."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest
import sqlalchemy
from optuna.trial import TrialState

import hydra_tune as ht
from hydra_tune.core.errors import DatabaseAway, StorageError
from hydra_tune.storage import open_storage
from tests.fault import searches

OPTIONS: dict[str, Any] = {"devices": "1xcpu", "sampler": "random", "seed": 1, "study": "s"}
REFUSE = (
    "ALTER DATABASE {name} ALLOW_CONNECTIONS false",
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'",
)
ACCEPT = ("ALTER DATABASE {name} ALLOW_CONNECTIONS true",)
READ_ONLY = ("ALTER DATABASE {name} SET default_transaction_read_only = on", REFUSE[1])
WRITABLE = ("ALTER DATABASE {name} RESET default_transaction_read_only", REFUSE[1])


def tell_server(url: str, statements: tuple[str, ...]) -> None:
    """Change how the server treats a database, over a connection to another one."""
    parts = urlsplit(url)
    name = parts.path.strip("/")
    with psycopg.connect(f"postgresql://tester@/postgres?{parts.query}", autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.format(name=name))


def objective_during(url: str, away: tuple[str, ...], back: tuple[str, ...]) -> Any:
    def objective(trial: Any) -> float:
        x = trial.suggest_float("x", 0, 1)
        if trial.number == 1:
            tell_server(url, away)
        if trial.number == 4:  # three trials have ended meanwhile
            time.sleep(1.5)  # so that attempts to write fail
            tell_server(url, back)
        return x

    return objective


@pytest.mark.parametrize(("away", "back"), [(REFUSE, ACCEPT), (READ_ONLY, WRITABLE)], ids=["refusing", "read-only"])
def test_trials_go_on_while_the_server_is_away(
    postgresql_url: str, away: tuple[str, ...], back: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    with closing(
        ht.search(objective_during(postgresql_url, away, back), trials=7, storage=postgresql_url, **OPTIONS)
    ) as result:
        assert [record.state for record in result.trials] == ["COMPLETE"] * 7
        values = [record.value for record in result.trials]
    said = capfd.readouterr().err
    assert said.count("the database is away since ") == 1
    assert said.count("the database is back after ") == 1
    with closing(ht.search(lambda trial: trial.suggest_float("x", 0, 1), trials=7, **OPTIONS)) as unbroken:
        assert values == [record.value for record in unbroken.trials]


def test_a_server_that_is_restarted_loses_nothing(postgresql_url: str) -> None:
    folder = Path(parse_qs(urlsplit(postgresql_url).query)["host"][0])
    program = sorted(Path("/usr/lib/postgresql").glob("*/bin/pg_ctl"))[-1]
    owner = folder.stat()
    identity: dict[str, Any] = {}
    if os.getuid() == 0:  # PostgreSQL refuses to run as root
        identity = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}

    def objective(trial: Any) -> float:
        if trial.number == 2:
            restart = [str(program), "-D", str(folder / "data"), "-m", "immediate", "-w", "-s", "restart"]
            with open(folder / "log", "a") as log:  # the server keeps it open; a pipe would never end
                subprocess.run(restart, check=True, cwd=folder, stdout=log, stderr=log, **identity)
        return trial.suggest_float("x", 0, 1)

    with closing(ht.search(objective, trials=6, storage=postgresql_url, progress=False, **OPTIONS)) as result:
        assert [record.state for record in result.trials] == ["COMPLETE"] * 6


def test_a_server_that_stays_away_stops_the_search_cleanly(postgresql_url: str, tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text(
        "from tests.storage.test_away import REFUSE, tell_server\n"
        "def build(trial):\n    x = trial.suggest_float('x', 0, 1)\n"
        f"    if trial.number == 2:\n        tell_server({postgresql_url!r}, REFUSE)\n    return x\n"
    )
    flags = ["--trials", "100000", "--devices", "1xcpu", "--study", "s", "--storage", postgresql_url]
    command = searches.command("search", "b.py:build", *flags, "--database-patience", "2")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: database postgresql")
    assert f"then go on with: hydra-tune resume s --storage '{postgresql_url}'" in last
    tell_server(postgresql_url, ACCEPT)
    acknowledged = {int(line.split("trial ")[1].split()[0]) for line in done.stderr.splitlines() if "COMPLETE" in line}
    with open_storage(postgresql_url, read_only=True) as storage:
        ended = {t.number for t in storage.get_all_trials(1) if t.state is TrialState.COMPLETE}
    assert acknowledged <= ended


@pytest.mark.parametrize("how", ["removed", "renamed", "replaced"])
def test_a_file_that_is_gone_is_noticed_at_once(tmp_path: Path, how: str) -> None:
    (tmp_path / "b.py").write_text(
        "import os, time\ndef build(trial):\n    x = trial.suggest_float('x', 0, 1)\n"
        "    open(f'begun-{trial.number}', 'w').close()\n"
        "    while trial.number == 2 and not os.path.exists('go'):\n        time.sleep(0.02)\n    return x\n"
    )
    flags = ["--trials", "1000000", "--devices", "1xcpu", "--study", "s"]
    database = tmp_path / "hydra_tune.db"
    with searches.started("search", "b.py:build", *flags, folder=tmp_path) as search:
        searches.wait_for((tmp_path / "begun-2").exists, "the third trial")
        if how == "removed":
            database.unlink()
        else:
            database.rename(tmp_path / "other.db")
        if how == "replaced":
            shutil.copy(tmp_path / "other.db", database)
        (tmp_path / "go").touch()
        _, errors = search.communicate()
    assert search.returncode == 2
    last = errors.splitlines()[-1]
    assert "hydra_tune.db' was removed, renamed or replaced while it was in use (put it back, then resume" in last
    assert database.exists() == (how == "replaced"), "no empty database is made in its place"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("database is locked", DatabaseAway),
        ("attempt to write a readonly database", DatabaseAway),
        ("database or disk is full", StorageError),
        ("database disk image is malformed", StorageError),
    ],
)
def test_the_kind_of_an_error_says_if_waiting_helps(sqlite_url: str, text: str, kind: type[StorageError]) -> None:
    def fail(*_: object) -> None:
        raise sqlalchemy.exc.OperationalError("BEGIN", {}, sqlite3.OperationalError(text))

    with open_storage(sqlite_url) as storage:
        sqlalchemy.event.listen(storage.engine, "begin", fail)
        with pytest.raises(StorageError) as caught:
            storage.get_study_id_from_name("s")
        assert caught.type is kind
        sqlalchemy.event.remove(storage.engine, "begin", fail)
