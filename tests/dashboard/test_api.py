"""The answers of the JSON API compared with those of the command line and of Optuna on the same database."""

from __future__ import annotations

import io
import json
import posixpath
import re

import numpy as np
import optuna
import pandas
import pytest

from hydra_tune.storage import StudyRecords, open_storage
from hydra_tune.storage.queries import list_studies, trial_records
from tests.dashboard.conftest import Client
from tests.dashboard.studies import HOSTILE


def test_studies_are_those_of_the_command_line(client: Client, url: str) -> None:
    found = {study["name"]: study for study in client().get("/api/studies").json()}
    with open_storage(url, read_only=True) as storage:
        summaries = list_studies(storage)
    assert set(found) == {summary.name for summary in summaries}
    for summary in summaries:
        study = found[summary.name]
        assert study["counts"] == summary.trials
        assert study["trials"] == sum(summary.trials.values())
        assert (study["best"] or {}).get("number") == summary.best_number
    assert found["troubled"]["state"] == "finished"
    assert found[HOSTILE]["state"] == "open"
    assert found["two"]["best"] is None


def test_the_leaderboard_is_that_of_the_records(client: Client, url: str) -> None:
    with open_storage(url, read_only=True) as storage:
        records = trial_records(storage, "many")
    page = client().get("/api/studies/4/trials", params={"limit": 1000}).json()
    rows = {row["number"]: row for row in page["rows"]}
    assert page["total"] == page["matching"] == len(records) == len(rows)
    for record in records:
        row = rows[record.number]
        assert row["params"] == record.params
        assert row["values"] == [record.value]
        assert (row["state"], row["seconds"], row["error"]) == (record.state, record.seconds, record.error)
    done = [row for row in page["rows"] if row["state"] == "COMPLETE"]
    assert page["rows"][: len(done)] == done
    assert done == sorted(done, key=lambda row: -row["values"][0])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("state:failed", lambda row: row["state"] == "FAILED"),
        ("lr<0.001", lambda row: row["params"]["lr"] < 0.001),
        ("lr<0.001 depth>=4 activation=relu",
         lambda row: row["params"]["lr"] < 0.001 and row["params"]["depth"] >= 4
         and row["params"]["activation"] == "relu"),
        ("accuracy>0.9 state:complete", lambda row: row["state"] == "COMPLETE" and row["values"][0] > 0.9),
        ("activation!=relu", lambda row: row["params"]["activation"] != "relu"),
        ('"shapes cannot"', lambda row: "shapes cannot" in row["error"]),
        ("number<10", lambda row: row["number"] < 10),
    ],
)  # fmt: skip
def test_filters(client: Client, text: str, wanted: object) -> None:
    app = client()
    rows = app.get("/api/studies/4/trials", params={"limit": 1000}).json()["rows"]
    found = app.get("/api/studies/4/trials", params={"limit": 1000, "filter": text}).json()
    expected = {row["number"] for row in rows if wanted(row)}  # type: ignore[operator]
    assert 0 < len(expected) < 600
    assert {row["number"] for row in found["rows"]} == expected
    assert found["matching"] == len(expected)


@pytest.mark.parametrize(
    ("text", "says"),
    [("lrr<1", "did you mean 'lr'"), ("lr<x", "give a number"), ('"open', "quotation"),
     ("activation=rellu", "did you mean 'relu'")],
)  # fmt: skip
def test_a_filter_that_cannot_be_read_says_why(client: Client, text: str, says: str) -> None:
    answer = client().get("/api/studies/4/trials", params={"filter": text})
    assert answer.status_code == 422
    assert says in answer.json()["detail"]


@pytest.mark.parametrize(
    "sort", ["number", "value", "accuracy", "lr", "activation", "seconds", "memory", "state", "strategy"]
)
@pytest.mark.parametrize("down", [False, True])
def test_pages_together_are_the_sorted_whole(client: Client, sort: str, down: bool) -> None:
    app = client()
    query = {"sort": sort, "descending": down}
    whole = app.get("/api/studies/4/trials", params={**query, "limit": 1000}).json()["rows"]
    parts = [
        app.get("/api/studies/4/trials", params={**query, "limit": 200, "offset": i}).json()["rows"]
        for i in (0, 200, 400)
    ]
    assert [row for part in parts for row in part] == whole
    assert len({row["number"] for row in whole}) == 600
    if sort == "lr":
        values = [row["params"]["lr"] for row in whole]
        assert values == sorted(values, reverse=down)
    if sort == "value":
        present = [row["values"][0] for row in whole if row["values"][0] is not None]
        assert [row["values"][0] for row in whole][: len(present)] == sorted(present, reverse=down)


def test_the_history_has_every_record(client: Client, url: str) -> None:
    history = client().get("/api/studies/4/history").json()
    study = optuna.load_study(study_name="many", storage=open_storage(url, read_only=True))
    best, records = -np.inf, []
    for trial in study.trials:
        if trial.state.name == "COMPLETE" and trial.value > best:
            best = trial.value
            records.append((trial.number, trial.value))
    study._storage.close()
    assert list(zip(history["best_numbers"], history["best_values"], strict=True)) == records
    assert len(history["numbers"]) == history["complete"]


def test_the_pareto_front_is_optunas(client: Client, url: str) -> None:
    found = client().get("/api/studies/2/pareto").json()
    study = optuna.load_study(study_name="two", storage=open_storage(url, read_only=True))
    assert found["front"] == sorted(trial.number for trial in study.best_trials)
    study._storage.close()


def test_importances_find_what_was_made_to_matter(client: Client) -> None:
    found = client().get("/api/studies/4/importances").json()
    assert found["shares"][0]["name"] == "lr"
    assert sum(one["share"] for one in found["shares"]) == pytest.approx(1)
    assert found["trials"] == found["complete"] > 300


def test_a_trial_has_its_curves_attempts_and_traceback(client: Client) -> None:
    app = client()
    failed = app.get("/api/studies/1/trials/2").json()
    assert failed["state"] == "FAILED"
    assert "alert('from a traceback')" in failed["attempts"][0]["traceback"]
    trial = app.get("/api/studies/1/trials/0").json()
    assert {curve["name"] for curve in trial["curves"]} >= {"accuracy", "loss"}
    assert [len(curve["x"]) for curve in trial["curves"]] == [3] * len(trial["curves"])
    assert trial["strategy"] == "whole"
    assert trial["budget_bytes"] > trial["peak_device_bytes"] > 0
    assert {row["kind"] for row in trial["work"]} >= {"build", "train", "evaluate"}


def test_numbers_that_json_lacks_come_as_words(client: Client) -> None:
    answer = client().get("/api/studies/3/trials", params={"sort": "number"})
    json.loads(answer.text, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    rows = answer.json()["rows"]
    assert rows[2]["values"] == ["inf"]
    assert rows[1]["values"] == [None]


def test_device_time_adds_up(client: Client) -> None:
    app = client()
    devices = app.get("/api/studies/1/devices").json()
    work = [row for n in range(6) for row in app.get(f"/api/studies/1/trials/{n}").json()["work"]]
    on_devices = sum(row["seconds"] for row in work if row["device"] != "builder")
    assert sum(device["seconds"] for device in devices["devices"]) == pytest.approx(on_devices)
    assert devices["makespan"] >= devices["bound"] > 0
    assert 0 < devices["utilisation"] <= 1
    timeline = app.get("/api/studies/1/timeline", params={"bins": 50}).json()
    assert timeline["exact"]
    assert len(timeline["units"]) == devices["units"]
    width = (timeline["end"] - timeline["start"]) / 50
    busy = sum(sum(series["busy"]) * width for series in timeline["series"])
    assert busy == pytest.approx(on_devices, rel=0.02)


def test_many_units_come_in_bins_and_few_as_themselves(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra_tune.dashboard import device_answers

    app = client()
    exact = app.get("/api/studies/4/timeline", params={"bins": 40}).json()
    monkeypatch.setattr(device_answers, "MOST_UNITS", 100)
    binned = app.get(
        "/api/studies/4/timeline", params={"bins": 40, "start": exact["start"], "end": exact["end"]}
    ).json()
    assert exact["exact"]
    assert not binned["exact"]
    assert len(binned["units"]) <= 40 * 2
    for ours, theirs in zip(binned["series"], exact["series"], strict=True):
        assert sum(ours["busy"]) == pytest.approx(sum(theirs["busy"]), rel=0.02)
    zoomed = app.get("/api/studies/4/timeline", params={"start": exact["start"], "end": exact["start"] + 10}).json()
    assert zoomed["exact"]
    assert all(unit["started"] <= exact["start"] + 10 for unit in zoomed["units"])


def test_what_lay_in_the_spill_store_over_time(client: Client, url: str) -> None:
    app = client()
    before = app.get("/api/studies/4/timeline", params={"bins": 4}).json()
    assert before["spilled"] == {"host_bytes": [None] * 4, "disk_bytes": [None] * 4}
    assert app.get("/api/studies/4/devices").json()["spilled_bytes"] is None
    start, width = before["start"], (before["end"] - before["start"]) / 4
    with open_storage(url) as storage:
        records = StudyRecords(storage, 4)
        for share, host, disk in ((1.2, 100, 0), (1.4, 300, 10), (1.6, 200, 20), (3.5, 0, 0)):
            records.spilled(start + share * width, host, disk)
    after = app.get("/api/studies/4/timeline", params={"bins": 4}).json()
    assert after["spilled"] == {"host_bytes": [None, 300, 200, 200], "disk_bytes": [None, 20, 20, 20]}
    assert app.get("/api/studies/4/devices").json()["spilled_bytes"] == 310
    late = {"bins": 2, "start": start + 3.6 * width, "end": before["end"]}
    assert app.get("/api/studies/4/timeline", params=late).json()["spilled"]["host_bytes"] == [0, 0]


def test_downloads_hold_every_trial(client: Client) -> None:
    app = client()
    csv = pandas.read_csv(io.BytesIO(app.get("/api/studies/4/trials.csv").content))
    parquet = pandas.read_parquet(io.BytesIO(app.get("/api/studies/4/trials.parquet").content))
    assert len(csv) == len(parquet) == 600
    assert csv["params.lr"].to_numpy() == pytest.approx(parquet["params.lr"].to_numpy())
    assert set(parquet["state"]) == {"COMPLETE", "PRUNED", "FAILED"}
    hostile = app.get("/api/studies/3/trials.csv").text
    assert "=HYPERLINK" not in hostile.replace("'=HYPERLINK", "")


def test_a_study_made_by_plain_optuna_shows_what_optuna_knows(client: Client) -> None:
    app = client()
    study = app.get("/api/studies/3").json()
    assert study["name"] == HOSTILE
    assert {one["name"] for one in study["parameters"]} == {"<b>x</b>", "javascript:alert(2)"}
    trial = app.get("/api/studies/3/trials/0").json()
    assert trial["reports"]["x"] == [0, 1, 2]
    assert app.get("/api/studies/3/devices").json()["units"] == 0
    assert app.get("/api/studies/3/timeline").json()["units"] == []


def test_what_is_not_there_is_not_found(client: Client) -> None:
    app = client()
    for path in ("/api/studies/99", "/api/studies/99/live", "/api/studies/1/trials/99", "/api/studies/99/trials.csv"):
        answer = app.get(path)
        assert answer.status_code == 404, path
        assert "there is no study" in answer.text or "has no trial" in answer.text


def test_a_study_that_is_deleted_and_made_again_is_read_again(client: Client, url: str) -> None:
    app = client()
    assert app.get("/api/studies/4").json()["trials"] == 600
    optuna.delete_study(study_name="many", storage=url)
    storage = optuna.storages.RDBStorage(url)
    again = optuna.create_study(study_name="other", storage=storage)
    again.optimize(lambda trial: trial.suggest_float("y", 0, 1), n_trials=2)
    study_id = again._study_id
    storage.remove_session()
    storage.engine.dispose()
    import time

    time.sleep(0.3)  # what was read so recently is not asked again
    study = app.get(f"/api/studies/{study_id}").json()
    assert (study["name"], study["trials"]) == ("other", 2)
    if study_id != 4:
        assert app.get("/api/studies/4").status_code == 404


@pytest.mark.parametrize("path", ["/", "/api", "/login", "/studies/1", "/studies/1/devices", "/studies/1/trials/0"])
def test_a_page_names_the_modules_that_it_needs(client: Client, path: str) -> None:
    app = client()
    named = re.findall(r"<(/static/[^>]+)>; rel=modulepreload", app.get(path).headers["link"])
    assert "/static/app.js" in named
    for module in named:
        text = app.get(module).text
        for other in re.findall(r'^import .* from "(\.[^"]+)";$', text, flags=re.MULTILINE):
            assert posixpath.normpath(posixpath.join(posixpath.dirname(module), other)) in named, module
