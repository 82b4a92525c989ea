"""The same API on a PostgreSQL server, which rounds, sums and isolates transactions differently."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from benchmarks.many_trials import write_study
from hydra_tune.dashboard import device_answers
from hydra_tune.dashboard.app import guarded, make_app
from hydra_tune.dashboard.security import Policy, hosts_for
from tests.dashboard.conftest import TOKEN
from tests.storage.conftest import postgresql_admin as postgresql_admin
from tests.storage.conftest import postgresql_server as postgresql_server
from tests.storage.conftest import postgresql_url as postgresql_url

PARTS = (
    "", "/trials", "/trials/3", "/history", "/reports", "/sample", "/importances", "/pareto", "/failures", "/devices",
    "/timeline", "/units?after=10", "/events", "/trials.csv", "/trials.parquet", "/actions",
)  # fmt: skip


def test_every_route_answers_alike_on_both_databases(
    postgresql_url: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for url in (postgresql_url, f"sqlite:///{tmp_path}/same.db"):
        study_id = write_study(url, "same", trials=300, reports=5)
        policy = Policy(hosts=hosts_for("127.0.0.1"), token=TOKEN, actions=True)
        headers = {"authorization": f"Bearer {TOKEN}", "origin": "http://localhost"}
        app = guarded(make_app(url, policy))
        with TestClient(app, base_url="http://localhost", headers=headers) as client:
            answers = {part: client.get(f"/api/studies/{study_id}{part}") for part in PARTS}
            assert {part: answer.status_code for part, answer in answers.items()} == dict.fromkeys(PARTS, 200)
            monkeypatch.setattr(device_answers, "MOST_UNITS", 50)
            stretch = answers["/timeline"].json()
            bins = {"bins": 30, "start": stretch["start"], "end": stretch["end"]}
            answers["binned"] = client.get(f"/api/studies/{study_id}/timeline", params=bins)
            monkeypatch.undo()
            note = client.put(f"/api/studies/{study_id}/trials/1/note", json={"text": "kept"})
            assert note.status_code == 204
            assert client.get(f"/api/studies/{study_id}/trials/1").json()["note"] == "kept"
            asked = client.post(f"/api/studies/{study_id}/actions", json={"kind": "add-trials", "count": 2})
            assert asked.status_code == 202
        found.append(answers)
    on_server, in_file = found
    for part in ("/trials", "/history", "/sample", "/failures", "/pareto", "/devices"):
        assert on_server[part].json() == in_file[part].json(), part
    for ours, theirs in zip(on_server["binned"].json()["series"], in_file["binned"].json()["series"], strict=True):
        assert ours["busy"] == pytest.approx(theirs["busy"])
    assert on_server["/trials.csv"].text == in_file["/trials.csv"].text
