"""Optuna's own contract test, on all databases, writing through and batching."""

import gc
from collections.abc import Iterator

import pytest
from optuna.storages import BaseStorage
from optuna.testing.pytest_storages import StorageTestCase

from hydra_tune.storage import HydraStorage


class Contract(StorageTestCase):
    def test_pickle_storage(self, storage: BaseStorage) -> None:
        super().test_pickle_storage(storage)
        gc.collect()  # Optuna's test does not close the copy it makes.


class TestSQLite(Contract):
    @pytest.fixture
    def storage(self, sqlite_storage: HydraStorage) -> HydraStorage:
        return sqlite_storage


class TestSQLiteBatching(Contract):
    @pytest.fixture
    def storage(self, sqlite_storage: HydraStorage) -> Iterator[HydraStorage]:
        with sqlite_storage.batching():
            yield sqlite_storage


class TestPostgreSQL(Contract):
    @pytest.fixture
    def storage(self, postgresql_storage: HydraStorage) -> HydraStorage:
        return postgresql_storage


class TestPostgreSQLBatching(Contract):
    @pytest.fixture
    def storage(self, postgresql_storage: HydraStorage) -> Iterator[HydraStorage]:
        with postgresql_storage.batching():
            yield postgresql_storage


class TestMariaDB(Contract):
    @pytest.fixture
    def storage(self, mariadb_storage: HydraStorage) -> HydraStorage:
        return mariadb_storage


class TestMariaDBBatching(Contract):
    @pytest.fixture
    def storage(self, mariadb_storage: HydraStorage) -> Iterator[HydraStorage]:
        with mariadb_storage.batching():
            yield mariadb_storage
