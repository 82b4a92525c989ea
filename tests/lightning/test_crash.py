"""A Lightning objective under kill -9 and Ctrl-C resumes from its checkpoint with the result of an unbroken run."""

from __future__ import annotations

import json
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hydra_tune.storage import open_storage
from hydra_tune.storage.queries import trial_attempts
from tests.fault.searches import kill_and_reap, run, started, values, wait_for, workers_of

SPEC = Path(__file__).with_name("slow_objective.py")
SEARCH = [
    "search", f"{SPEC}:objective", "--trials", "2", "--sampler", "random", "--seed", "4", "--devices", "2xcpu",
    "--checkpoint-seconds", "0.1", "--study", "s",
]  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("unbroken")
    done = run(*SEARCH, folder=folder)
    assert done.returncode == 0, done.stderr
    # Lightning keeps quiet: its bars, tips and summaries do not reach the search's display.
    lines = [line for line in done.stderr.splitlines() if line.startswith("[cpu:")]
    assert not [line for line in lines if "Epoch" in line or "Tip" in line or "GPU" in line or "Params" in line]
    return values(folder, "s")


def checkpoint(folder: Path) -> Path:
    pattern = "hydra_tune_files/study-*/trial-*.checkpoints/fit-0/step-*.json"
    found: Path = wait_for(lambda: next(folder.glob(pattern), None), "a checkpoint of the fit")
    return found


def reports(folder: Path) -> list[int]:
    with closing(sqlite3.connect(folder / "hydra_tune.db")) as connection:
        query = "SELECT trial_id, count(*) FROM trial_intermediate_values GROUP BY trial_id"
        return [count for _, count in connection.execute(query)]


def test_a_killed_worker_goes_on_from_its_checkpoint(tmp_path: Path, unbroken: list[Any]) -> None:
    with started(*SEARCH, folder=tmp_path) as search:
        checkpoint(tmp_path)
        for worker in workers_of(search):
            worker.kill()
        _, errors = search.communicate()
    assert search.returncode == 0, errors
    assert values(tmp_path, "s") == unbroken
    assert reports(tmp_path) == [8, 8]
    with open_storage(f"sqlite:///{tmp_path}/hydra_tune.db", read_only=True) as storage:
        attempts = [trial_attempts(storage, "s", number) for number in range(2)]
    assert {tries[0].state for tries in attempts if len(tries) == 2} == {"LOST"}
    assert not list(tmp_path.glob("hydra_tune_files/*/*.checkpoints")), "they are removed at the trial's end"
    with closing(sqlite3.connect(tmp_path / "hydra_tune.db")) as connection:
        last = connection.execute("SELECT value_json FROM trial_user_attributes WHERE key = 'lightning'").fetchall()
    assert min(json.loads(text)["batches"] for (text,) in last) < 8 * 20, "one of them did not start again"


def test_a_killed_coordinator_is_resumed(tmp_path: Path, unbroken: list[Any]) -> None:
    with started(*SEARCH, folder=tmp_path) as search:
        checkpoint(tmp_path)
        kill_and_reap(search)
    resumed = run("resume", "s", folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert values(tmp_path, "s") == unbroken
    assert reports(tmp_path) == [8, 8]
    assert not list(tmp_path.glob("hydra_tune_files/*/*.checkpoints"))


def test_one_signal_checkpoints_and_stops(tmp_path: Path, unbroken: list[Any]) -> None:
    with started(*SEARCH, "--checkpoint-seconds", "1000", folder=tmp_path) as search:
        wait_for(lambda: (tmp_path / "hydra_tune.db").exists() and started_reporting(tmp_path), "a report")
        search.send_signal(signal.SIGINT)
        _, errors = search.communicate()
    assert search.returncode == 130, errors
    assert list(tmp_path.glob("hydra_tune_files/*/*.checkpoints/fit-0/*.json"))
    resumed = run("resume", "s", folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert values(tmp_path, "s") == unbroken


def started_reporting(folder: Path) -> bool:
    try:
        return bool(reports(folder))
    except sqlite3.OperationalError:  # the tables are not there yet
        return False
