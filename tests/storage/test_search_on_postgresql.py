"""A search whose database is a real PostgreSQL server."""

from __future__ import annotations

import shutil
import signal
from datetime import timedelta
from pathlib import Path

import pytest
from optuna.trial import TrialState
from sqlalchemy import select, update

import hydra_tune as ht
from hydra_tune.cli.app import run
from hydra_tune.storage import open_storage
from hydra_tune.storage.database import writing
from hydra_tune.storage.tables import HYDRA_EVENTS, HYDRA_LEASES, utc_now
from tests.candidates import build_small
from tests.fault import searches


def test_a_search_runs_and_resumes_on_postgresql(postgresql_url: str):
    options = {"study": "pg", "storage": postgresql_url, "devices": "2xcpu", "sampler": "random", "progress": False}
    first = ht.search(build_small, trials=2, seed=1, **options)
    values = [record.value for record in first.trials]
    assert first.best_model() is not None
    more = ht.search(build_small, trials=3, resume=True, **options)
    assert [record.value for record in more.trials][:2] == values
    assert run(["show", "pg", "2", "--storage", postgresql_url, "--json"]) == 0
    assert run(["doctor", "--storage", postgresql_url]) == 0
    first.close()
    more.close()


def test_the_files_are_found_from_another_folder(postgresql_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    options = {"study": "pg", "storage": postgresql_url, "devices": "1xcpu", "sampler": "random", "progress": False}
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    ht.search(build_small, trials=1, seed=1, **options).close()
    monkeypatch.chdir(there)
    more = ht.search(build_small, trials=2, resume=True, **options)
    assert more.best_model() is not None
    assert len(list(here.rglob("trial-*.safetensors"))) == 2
    assert run(["export", "pg", "--to", "out", "--storage", postgresql_url]) == 0
    assert run(["doctor", "--storage", postgresql_url]) == 0
    assert not list(there.glob("hydra_tune_files"))
    # Where they are out of reach, that is said, and the present folder is used.
    shutil.rmtree(here / "hydra_tune_files")
    ht.search(build_small, trials=3, resume=True, **options).close()
    assert len(list(there.rglob("trial-*.safetensors"))) == 1
    with more._storage.reading() as connection:
        events = select(HYDRA_EVENTS.c.message).where(HYDRA_EVENTS.c.kind != "pool")
        notes = connection.execute(events).scalars().all()
    assert [f"were in {here}" in note for note in notes] == [True]
    more.close()


def test_a_killed_search_is_resumed_from_another_folder(postgresql_url: str, tmp_path: Path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    flags = ["--study", "s", "--storage", postgresql_url]
    command = ["search", f"{searches.SPEC}:build", *searches.COMMON, "--trials", "1", *flags]
    with searches.started(*command, folder=here) as search:
        pattern = "hydra_tune_files/*/study-*/trial-*/step-*.json"
        step = searches.wait_for(lambda: next(here.glob(pattern), None), "a checkpoint")
        searches.kill_and_reap(search)
    assert step.parent.is_dir()
    resumed = searches.run("resume", "s", "--storage", postgresql_url, folder=there)
    assert resumed.returncode == 0, resumed.stderr
    assert not step.parent.exists(), "used, and removed when the trial had ended"
    assert list(here.rglob("trial-0.safetensors"))
    assert not list(there.iterdir())


GATED = """
import os, time
def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    open(f"begun-{trial.number}", "w").close()
    while trial.number and not os.path.exists("go"):
        time.sleep(0.02)
    return x
"""


def test_a_coordinator_that_wakes_after_another_took_over_writes_nothing(postgresql_url: str, tmp_path: Path):
    """As after a suspend: the first is stopped, its lease seems to be of another host and has not been renewed."""
    (tmp_path / "gated.py").write_text(GATED)
    flags = ["--trials", "6", "--devices", "1xcpu", "--sampler", "random", "--study", "s", "--storage", postgresql_url]
    with searches.started("search", "gated.py:objective", *flags, folder=tmp_path) as first:
        searches.wait_for((tmp_path / "begun-1").exists, "the second trial")
        first.send_signal(signal.SIGSTOP)
        with open_storage(postgresql_url) as storage, writing(storage.engine) as connection:
            long_ago = utc_now() - timedelta(hours=1)
            connection.execute(update(HYDRA_LEASES).values(host="another", renewed=long_ago))
        (tmp_path / "go").touch()
        second = searches.run("resume", "s", "--storage", postgresql_url, "--json", folder=tmp_path)
        assert second.returncode == 0, second.stderr
        first.send_signal(signal.SIGCONT)
        _, errors = first.communicate()
    assert first.returncode == 2
    assert errors.splitlines()[-1].startswith("error: another process has taken this study over")
    with open_storage(postgresql_url, read_only=True) as storage:
        trials = storage.get_all_trials(1)
    assert [trial.number for trial in trials] == list(range(6))
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
