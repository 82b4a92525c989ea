"""Leases: one holder at a time, free when the holder is dead; a holder that lost its lease notices."""

from __future__ import annotations

import os
import threading
import time
from datetime import datetime, timedelta
from typing import Any

import optuna
import pytest
from optuna.study import StudyDirection
from sqlalchemy import update

import hydra_tune as ht
from hydra_tune.core.errors import StorageError
from hydra_tune.storage import open_storage
from hydra_tune.storage.database import writing
from hydra_tune.storage.leases import HeldLease, Lease, process_runs, process_start, read_leases
from hydra_tune.storage.optuna_storage import HydraStorage
from hydra_tune.storage.tables import HYDRA_LEASES, utc_now

DEAD = {"pid": 2**22 - 1}
ELSEWHERE = {"host": "another-host"}


@pytest.fixture
def study_id(sqlite_storage: HydraStorage) -> int:
    return sqlite_storage.create_new_study([StudyDirection.MINIMIZE], "s")


def change(storage: HydraStorage, **values: object) -> None:
    with writing(storage.engine) as connection:
        connection.execute(update(HYDRA_LEASES).values(**values))


def test_a_lease_has_one_holder(sqlite_storage: HydraStorage, study_id: int):
    lease = HeldLease(sqlite_storage, study_id, "s")
    with pytest.raises(StorageError, match=f"study 's' is being run by process {os.getpid()} on"):
        HeldLease(sqlite_storage, study_id, "s")
    lease.renew()
    lease.release()
    HeldLease(sqlite_storage, study_id, "s").release()
    with sqlite_storage.reading() as connection:
        assert read_leases(connection) == []


def test_a_dead_holder_on_this_host_is_free_at_once(sqlite_storage: HydraStorage, study_id: int):
    lost = HeldLease(sqlite_storage, study_id, "s")
    change(sqlite_storage, **DEAD)
    HeldLease(sqlite_storage, study_id, "s")
    with pytest.raises(StorageError, match="another process has taken this study over"):
        lost.renew()


def test_a_holder_on_another_host_is_believed_while_it_renews(sqlite_storage: HydraStorage, study_id: int):
    HeldLease(sqlite_storage, study_id, "s")
    change(sqlite_storage, **ELSEWHERE)
    with pytest.raises(StorageError, match="another-host"):
        HeldLease(sqlite_storage, study_id, "s")
    change(sqlite_storage, renewed=utc_now() - timedelta(seconds=61))
    HeldLease(sqlite_storage, study_id, "s")


def leases(storage: HydraStorage) -> list[Lease]:
    with storage.reading() as connection:
        return read_leases(connection)


@pytest.mark.parametrize("hours", [-1, 1])
def test_on_a_server_its_clock_counts(
    postgresql_storage: HydraStorage, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """A host whose own clock is an hour off neither takes a live lease over nor keeps a dead one."""
    study_id = postgresql_storage.create_new_study([StudyDirection.MINIMIZE], "s")
    first = HeldLease(postgresql_storage, study_id, "s")
    (before,) = leases(postgresql_storage)
    monkeypatch.setattr("hydra_tune.storage.leases.utc_now", lambda: utc_now() + timedelta(hours=hours))
    change(postgresql_storage, **ELSEWHERE)
    with pytest.raises(StorageError, match=r"another-host since 0 s|another-host since 1 s"):
        HeldLease(postgresql_storage, study_id, "s")
    first.renew()
    (after,) = leases(postgresql_storage)
    assert timedelta(0) < after.renewed - before.renewed < timedelta(minutes=1)
    change(postgresql_storage, renewed=after.renewed - timedelta(seconds=61))
    HeldLease(postgresql_storage, study_id, "s")


def wait_until(condition: Any) -> None:
    """For what another thread writes to the database."""
    while not condition():
        time.sleep(0.02)


class Thinking(optuna.samplers.RandomSampler):
    """A sampler that thinks until `enough` says so; it is asked on the study's own thread."""

    def __init__(self, enough: Any) -> None:
        super().__init__(seed=0)
        self.enough = enough

    def sample_independent(self, *args: Any, **options: Any) -> Any:
        assert threading.current_thread().name == "hydra-study"
        wait_until(self.enough)
        return super().sample_independent(*args, **options)


def objective(trial: Any) -> float:
    return trial.suggest_float("x", 0, 1)


def test_a_sampler_that_thinks_for_long_does_not_cost_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hydra_tune.storage.leases.RENEW_SECONDS", 0.1)
    monkeypatch.setattr("hydra_tune.storage.leases.STALE_AFTER", timedelta(seconds=0.5))
    seen: list[datetime] = []

    def long_enough() -> bool:
        with open_storage("sqlite:///hydra_tune.db", read_only=True) as storage:
            (lease,) = leases(storage)
        assert lease.read - lease.renewed < timedelta(seconds=0.5), "stale, to another host"
        seen.append(lease.renewed)
        return seen[-1] - seen[0] > timedelta(seconds=1)

    result = ht.search(objective, trials=1, sampler=Thinking(long_enough), devices="1xcpu", progress=False)
    assert result.completed == 1
    with open_storage("sqlite:///hydra_tune.db", read_only=True) as storage:
        assert leases(storage) == []


def test_a_lease_that_was_lost_while_the_sampler_thought_stops_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hydra_tune.storage.leases.RENEW_SECONDS", 0.1)
    warned: list[str] = []
    monkeypatch.setattr("hydra_tune.storage.leases.logger.warning", lambda *args: warned.append(str(args)))

    def until_lost() -> bool:
        with open_storage("sqlite:///hydra_tune.db") as storage:
            change(storage, holder="another")
        return bool(warned)

    with pytest.raises(StorageError, match="another process has taken this study over"):
        ht.search(objective, trials=3, sampler=Thinking(until_lost), devices="1xcpu", study="s", progress=False)
    with open_storage("sqlite:///hydra_tune.db", read_only=True) as storage:
        assert [lease.holder for lease in leases(storage)] == ["another"]
        trials = storage.get_all_trials(leases(storage)[0].study_id)
    assert not [trial for trial in trials if trial.state.is_finished()], "nothing was written after that"


def test_a_process_is_known_by_its_start():
    started = process_start(os.getpid())
    assert started is not None
    assert process_runs(os.getpid(), started)
    assert not process_runs(os.getpid(), started - 1)
    assert process_start(2**22 - 1) is None


def check_fence(storage: HydraStorage) -> None:
    """A holder that wakes after another has taken over writes nothing, whatever its clock says."""
    study_id = storage.create_new_study([StudyDirection.MINIMIZE], "s")
    HeldLease(storage, study_id, "s")
    with open_storage(storage.url) as other:
        storage.begin_batching()
        storage.create_new_trial(study_id)
        storage.flush()
        change(other, **DEAD)
        newer = HeldLease(other, study_id, "s")
        storage.create_new_trial(study_id)
        with pytest.raises(StorageError, match="another process has taken this study over"):
            storage.flush()
        assert other.get_n_trials(study_id) == 1
        storage.discard()
        storage.end_batching()
        with pytest.raises(StorageError, match="another process has taken this study over"):
            storage.set_study_user_attr(study_id, "late", 1)
        other.create_new_trial(study_id)
        newer.release()
        assert other.get_n_trials(study_id) == 2


def test_a_former_holder_writes_nothing(sqlite_storage: HydraStorage):
    check_fence(sqlite_storage)


def test_a_former_holder_writes_nothing_on_postgresql(postgresql_storage: HydraStorage):
    check_fence(postgresql_storage)


def test_two_that_take_over_at_the_same_moment_are_one_after_the_other(postgresql_storage: HydraStorage):
    study_id = postgresql_storage.create_new_study([StudyDirection.MINIMIZE], "s")
    HeldLease(postgresql_storage, study_id, "s")
    change(postgresql_storage, **DEAD)
    start, said = threading.Barrier(6), []

    def take() -> None:
        with open_storage(postgresql_storage.url) as storage:
            start.wait()
            try:
                HeldLease(storage, study_id, "s")
                said.append("taken")
            except StorageError as error:
                said.append(error.message)

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said.count("taken") == 1
    assert sum("is being run by process" in each for each in said) == 5
