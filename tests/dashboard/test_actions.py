"""Actions: recorded by the dashboard, executed by a running search in another process, refused without a token."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from hydra_tune.dashboard.app import guarded, make_app
from hydra_tune.dashboard.security import Policy, hosts_for
from tests.dashboard.conftest import TOKEN, Client
from tests.dashboard.searches import searching, until

HEADERS = {"origin": "http://localhost:8080", "authorization": f"Bearer {TOKEN}"}


def _client(folder: Path) -> TestClient:
    policy = Policy(hosts=hosts_for("127.0.0.1"), token=TOKEN, actions=True)
    app = guarded(make_app(f"sqlite:///{folder}/live.db", policy))
    return TestClient(app, base_url="http://localhost:8080", headers=HEADERS)


def _states(client: TestClient) -> dict[int, str]:
    rows = client.get("/api/studies/1/trials", params={"sort": "number"}).json()["rows"]
    return {row["number"]: row["state"] for row in rows}


def _ask(client: TestClient, **wish: Any) -> str:
    """Ask, and wait for what the search answers."""
    asked = client.post("/api/studies/1/actions", json=wish)
    assert asked.status_code == 202, asked.text

    def answer() -> str | None:
        actions = client.get("/api/studies/1/actions").json()
        return next(one["answer"] for one in actions if one["action_id"] == asked.json()["action_id"])

    return until(answer)


def _made(folder: Path) -> bool:
    """Return True once the search has made its tables and its first trial."""
    if not (folder / "live.db").exists():
        return False
    with closing(sqlite3.connect(folder / "live.db")) as database:
        tables = database.execute(
            "SELECT count(*) FROM sqlite_master WHERE name IN ('hydra_notes', 'trials')"
        ).fetchone()
        return tables == (2,) and database.execute("SELECT count(*) FROM trials").fetchone()[0] > 0


def test_a_running_search_obeys(tmp_path: Path) -> None:
    with searching(tmp_path, "build_slow", "--trials", "3", "--sampler", "random", "--seed", "1") as search:
        until(lambda: _made(tmp_path))
        with _client(tmp_path) as client:
            until(lambda: _states(client).get(1) == "RUNNING" and _states(client).get(0) == "RUNNING")
            assert client.post("/api/studies/1/actions", json={"kind": "retry-trial", "number": 0}).status_code == 409
            assert "trial 0 stops" in _ask(client, kind="stop-trial", number=0)
            until(lambda: _states(client).get(0) == "PRUNED")
            # The third one fails at once.
            until(lambda: _states(client).get(2) == "FAILED")
            stopped = client.get("/api/studies/1/trials/0").json()
            assert (stopped["state"], stopped["error"]) == ("PRUNED", "stopped on request")
            before = client.get("/api/studies/1/trials/2").json()["params"]
            assert _ask(client, kind="retry-trial", number=2) == "trial 2 is tried again as trial 3"
            # Parameters arrive one after another.
            until(lambda: len(client.get("/api/studies/1/trials/3").json().get("params", ())) == len(before))
            assert client.get("/api/studies/1/trials/3").json()["params"] == before
            assert client.get("/api/studies/1/trials/3").json()["user_attrs"] == {"retry_of": 2}
            assert _ask(client, kind="add-trials", count=4) == "the study has 8 trials now"
            until(lambda: client.get("/api/studies/1").json()["planned"] == 8)
            assert "stops" in _ask(client, kind="stop-study")
            assert search.wait() == 130
            until(lambda: client.get("/api/studies/1").json()["state"] == "stopped")
    with closing(sqlite3.connect(tmp_path / "live.db")) as database:
        (settings,) = database.execute("SELECT settings FROM hydra_studies").fetchone()
        assert json.loads(settings)["trials"] == 8
        assert database.execute("SELECT count(*) FROM hydra_actions WHERE answered IS NULL").fetchone() == (0,)


def test_what_is_asked_while_nobody_runs_the_study_is_done_when_it_is_resumed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hydra_tune"]
    place = ["--storage", "sqlite:///live.db", "--quiet", "--json"]
    spec = f"{Path(__file__).with_name('studies.py')}:build_two_objectives"
    flags = ["--trials", "2", "--devices", "2xcpu", "--study", "live"]
    subprocess.run([*command, "search", spec, *flags, *place], cwd=tmp_path, check=True, capture_output=True)
    with _client(tmp_path) as client:
        assert client.post("/api/studies/1/actions", json={"kind": "add-trials", "count": 2}).status_code == 202
        done = subprocess.run(
            [*command, "resume", "live", "--trust", spec.partition(":")[0], *place],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert len(json.loads(done.stdout)["trials"]) == 4
        assert client.get("/api/studies/1/actions").json()[0]["answer"] == "the study has 4 trials now"


def test_notes_are_kept_and_shown_as_they_are(client: Client) -> None:
    app = client(token=TOKEN, actions=True)
    path = "/api/studies/1/trials/0"
    for text in ("<script>alert(5)</script>\nsecond line", "shorter", ""):
        assert app.put(f"{path}/note", json={"text": text}, headers=HEADERS).status_code == 204
        assert app.get(path, headers=HEADERS).json()["note"] == text
    assert app.put(f"{path}/note", json={"text": "a\0b"}, headers=HEADERS).status_code == 422
    assert app.put("/api/studies/1/trials/99/note", json={"text": ""}, headers=HEADERS).status_code == 404


@pytest.mark.parametrize(
    ("wish", "status"),
    [
        ({"kind": "burn"}, 422),
        ({"kind": "add-trials"}, 422),
        ({"kind": "add-trials", "count": 0}, 422),
        ({"kind": "stop-study", "number": 1}, 422),
        ({"kind": "stop-trial", "number": 0}, 409),
        ({"kind": "retry-trial", "number": 0}, 409),
        ({"kind": "retry-trial", "number": 99}, 404),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(client: Client, wish: dict[str, Any], status: int) -> None:
    app = client(token=TOKEN, actions=True)
    answer = app.post("/api/studies/1/actions", json=wish, headers=HEADERS)
    assert answer.status_code == status, answer.text


def test_a_study_of_plain_optuna_cannot_be_asked(client: Client) -> None:
    app = client(token=TOKEN, actions=True)
    answer = app.post("/api/studies/3/actions", json={"kind": "stop-study"}, headers=HEADERS)
    assert answer.status_code == 409
