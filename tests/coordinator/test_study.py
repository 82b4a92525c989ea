"""The study that a search owns, without workers: which changes are written in one transaction."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import event

import hydra_tune as ht
from hydra_tune.coordinator.settings import make_settings
from hydra_tune.coordinator.study import OwnedStudy
from hydra_tune.core.states import Outcome, Status
from hydra_tune.training.source import PickledSource
from tests.candidates import build_small

pytestmark = pytest.mark.smoke


def objective(trial: Any) -> float:
    return 1.0


@pytest.fixture
def owned() -> Iterator[OwnedStudy]:
    study = OwnedStudy(make_settings(trials=2, study="s", seed=1), None, PickledSource.of(objective))
    yield study
    study.close()


def stored(query: str) -> list[Any]:
    with closing(sqlite3.connect("hydra_tune.db")) as connection:
        return connection.execute(query).fetchall()


def attempts() -> list[str]:
    return [state for (state,) in stored("SELECT state FROM hydra_attempts ORDER BY attempt")]


def test_the_end_of_a_lost_attempt_and_the_next_are_one_transaction(owned: OwnedStudy) -> None:
    asked = owned.ask()
    first = owned.begin_attempt(asked, 1)
    owned.flush()
    commits: list[int] = []
    event.listen(owned.storage.engine, "commit", lambda _connection: commits.append(1))
    second = owned.begin_attempt(asked, 2, (first.attempt, Outcome(Status.LOST, error="killed")))
    assert attempts() == ["RUNNING"], "nothing of it yet"
    owned.flush()
    assert attempts() == ["LOST", "RUNNING"]
    assert len(commits) == 1
    with pytest.raises(ValueError, match="is no longer run by this attempt"):
        owned.answer(asked.number, first.attempt, "report", (0.5, 0))
    owned.tell(asked.number, second.attempt, Outcome(Status.COMPLETE, (1.0,)), strategy="whole")
    owned.flush()
    assert attempts() == ["LOST", "COMPLETE"]
    assert stored("SELECT state FROM trials") == [("COMPLETE",)]
    assert stored("SELECT kind, message FROM hydra_events") == [
        ("refused", f"a late report of attempt {first.attempt}")
    ]
    with pytest.raises(ValueError, match="no trial can go from COMPLETE to FAILED"):
        owned.tell(asked.number, second.attempt, Outcome(Status.FAILED))


def test_a_search_touches_its_study_on_the_studys_thread_only(monkeypatch: pytest.MonkeyPatch) -> None:
    used: dict[str, set[str]] = {}

    def watched(name: str, method: Any) -> Any:
        def called(*args: Any, **options: Any) -> Any:
            used.setdefault(name, set()).add(threading.current_thread().name)
            return method(*args, **options)

        return called

    for name, method in list(vars(OwnedStudy).items()):
        if callable(method):
            monkeypatch.setattr(OwnedStudy, name, watched(name, method))
    ht.search(build_small, trials=2, devices="2xcpu", progress=False, checkpoint_seconds=0.001).close()
    assert used.keys() >= {"__init__", "ask", "begin_attempt", "epoch", "answer", "tell", "flush", "close"}
    assert set.union(*used.values()) == {"hydra-study"}
