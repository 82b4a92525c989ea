"""Leases: one holder at a time, free when the holder is dead, and a holder that lost it learns so."""

from __future__ import annotations

import os

import pytest
from optuna.study import StudyDirection
from sqlalchemy import update

from hydra_tune.errors import StorageError
from hydra_tune.storage.database import writing
from hydra_tune.storage.leases import HeldLease, process_runs, process_start, read_leases
from hydra_tune.storage.optuna_storage import HydraStorage
from hydra_tune.storage.tables import HYDRA_LEASES

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
    from datetime import timedelta

    from hydra_tune.storage.tables import utc_now

    HeldLease(sqlite_storage, study_id, "s")
    change(sqlite_storage, **ELSEWHERE)
    with pytest.raises(StorageError, match="another-host"):
        HeldLease(sqlite_storage, study_id, "s")
    change(sqlite_storage, renewed=utc_now() - timedelta(seconds=61))
    HeldLease(sqlite_storage, study_id, "s")


def test_a_process_is_known_by_its_start():
    started = process_start(os.getpid())
    assert started is not None
    assert process_runs(os.getpid(), started)
    assert not process_runs(os.getpid(), started - 1)
    assert process_start(2**22 - 1) is None
