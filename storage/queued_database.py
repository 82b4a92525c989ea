"""A database with a cache before it and a queue behind it: how `HydraStorage` reads and writes.

Two ways to write, chosen by `batching`:

- **Write-through**, the default: every change is a transaction of its own, and any number of processes may
  work on one study.
- **Batching**, for the one process that owns a study: changes go to the cache and wait in a queue, and
  `flush` writes them all in one transaction. What was flushed survives a crash whole; what was not is gone
  whole.

This class knows trials and studies as things to find and to change; what Optuna may ask is in
`optuna_storage`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Self

from optuna.trial import FrozenTrial
from sqlalchemy import Connection, Engine, Table, select

from hydra_tune.errors import StorageError
from hydra_tune.storage.cache import Cache, CachedStudy
from hydra_tune.storage.database import address, connect, masked, reading, writing
from hydra_tune.storage.schema import check_schema, ensure_schema
from hydra_tune.storage.tables import TRIALS
from hydra_tune.storage.write_queue import WriteQueue, lock_study

# Provisional ids count upwards from here, below every real id and within PostgreSQL's integers.
FIRST_PROVISIONAL_ID = -(2**31)


@dataclass
class Change:
    """Rows that go to the database together. `connection` is None while batching: then it is not asked."""

    rows: WriteQueue
    connection: Connection | None = None
    new_ids: dict[int, int] = field(default_factory=dict)


@dataclass
class TrialEdit:
    """A change of one trial: `trial` takes its newer form, `rows` the rows that say the same."""

    study: CachedStudy
    trial: FrozenTrial
    rows: WriteQueue

    def upsert(self, table: Table, row: Mapping[str, Any]) -> None:
        """A row that belongs to the trial."""
        self.rows.upsert(table, {"trial_id": self.trial._trial_id, **row})


class QueuedDatabase:
    """One engine, its cache and its queue; safe to share among threads, not across a fork."""

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        self._engine = connect(url, read_only=read_only)
        try:
            if not read_only:
                ensure_schema(self._engine)
            self._has_hydra_tables = check_schema(self._engine)
        except BaseException:
            self._engine.dispose()
            raise
        self.read_only = read_only
        self._cache = Cache()
        self._queue = WriteQueue()
        self._in_flight = WriteQueue()
        self._batching = False
        self._provisional_ids = count(FIRST_PROVISIONAL_ID)
        # `_lock` guards the cache and the queue; `_flush_lock` lets one flush run at a time. A flush takes
        # `_lock` only at its two ends, so that a slow disk does not stop the readers. Never wait for
        # `_flush_lock` while holding `_lock`.
        self._lock = threading.RLock()
        self._flush_lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        self.flush()  # A copy knows only what the database knows.
        return {"url": self.url, "read_only": self.read_only}

    def __setstate__(self, state: dict[str, Any]) -> None:
        QueuedDatabase.__init__(self, state["url"], read_only=state["read_only"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        """For transactions of one's own, which do not wait in the queue."""
        return self._engine

    @property
    def url(self) -> str:
        """The URL in full, password included; `masked` makes it fit for a message."""
        return address(self._engine)

    @property
    def has_hydra_tables(self) -> bool:
        """Whether our tables are there: a reader may have opened what so far only Optuna wrote."""
        self._has_hydra_tables = self._has_hydra_tables or check_schema(self._engine)
        return self._has_hydra_tables

    @property
    def pending(self) -> int:
        """How many rows wait to be written."""
        with self._lock:
            return len(self._queue) + len(self._in_flight)

    def close(self) -> None:
        """Write what waits and end all connections. Using the storage again connects again."""
        try:
            self.flush()
        finally:
            self._engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction for queries of one's own; it sees all that was written here before."""
        self.flush()
        with reading(self._engine) as connection:
            yield connection

    @contextmanager
    def batching(self) -> Iterator[None]:
        """Queue the writes of the block; they are flushed at its end, also after an exception."""
        self.begin_batching()
        try:
            yield
        finally:
            self.end_batching()

    def begin_batching(self) -> None:
        """From now on writes wait for `flush`. A study written now must have no other writer."""
        with self._lock:
            self._refuse_if_read_only()
            self._batching = True

    def end_batching(self) -> None:
        """Flush, then write through again; if the flush fails, batching goes on and nothing is lost."""
        with self._flush_lock, self._lock:
            self.flush()
            self._batching = False
            self._cache.share_all()

    def discard(self) -> None:
        """Drop all that waits to be written: the study is no longer this process's to write."""
        with self._flush_lock, self._lock:
            self._queue = WriteQueue()

    def flush(self) -> None:
        """Write all that waits in one transaction; if it fails, a StorageError says why and all waits on."""
        with self._flush_lock:
            with self._lock:
                if not self._queue:
                    return
                batch, self._queue = self._queue, WriteQueue()
                self._in_flight = batch
                last_ids = self._cache.last_row_ids(batch.studies_of_new_trials())
            try:
                with writing(self._engine) as connection:
                    ids = batch.write(connection, self._cache.row_ids, last_ids)
            except BaseException:
                with self._lock:
                    batch.extend(self._queue)
                    self._queue, self._in_flight = batch, WriteQueue()
                raise
            with self._lock:
                self._cache.learn_row_ids(ids)
                self._in_flight = WriteQueue()

    def add(self, table: Table, row: Mapping[str, Any]) -> None:
        """Insert a row of a `hydra_` table, in the same queue and transaction as the trials."""
        with self._changing() as change:
            change.rows.add(table, row)

    def upsert(self, table: Table, row: Mapping[str, Any]) -> None:
        """Insert a row of a `hydra_` table, or change the given columns of the one with its key."""
        with self._changing() as change:
            change.rows.upsert(table, row)

    def update(self, table: Table, row: Mapping[str, Any]) -> None:
        """Change the given columns of the row of a `hydra_` table with this primary key."""
        with self._changing() as change:
            change.rows.update(table, row)

    def _refuse_if_read_only(self) -> None:
        if self.read_only:
            raise StorageError(f"database {masked(self.url)} was opened to read", "open it without read_only")

    @contextmanager
    def _changing(self) -> Iterator[Change]:
        """Rows that go to the queue while batching, else to the database, when the block ends."""
        with self._lock:
            self._refuse_if_read_only()
            change = Change(WriteQueue())
            if self._batching:
                yield change
                self._queue.extend(change.rows)
                return
            with writing(self._engine) as change.connection:
                yield change
                last_ids = self._cache.last_row_ids(change.rows.studies_of_new_trials())
                change.new_ids = change.rows.write(change.connection, self._cache.row_ids, last_ids)

    @contextmanager
    def _editing(self, trial_id: int) -> Iterator[TrialEdit]:
        """A change of one trial; the cache follows once the rows are committed or queued."""
        with self._lock:
            with self._changing() as change:
                study, trial = self._trial_to_change(change, trial_id)
                edit = TrialEdit(study, trial, change.rows)
                yield edit
            if edit.trial is not trial:
                self._cache.put(study, edit.trial)
                study.learn_distributions(edit.trial)

    def _study(self, study_id: int) -> CachedStudy:
        """The study with its trials in their newest form; a KeyError where there is none."""
        owned = self._cache.owned(study_id)
        if owned is not None:
            return owned
        with reading(self._engine) as connection:
            return self._cache.refresh(connection, study_id)

    def _trial(self, trial_id: int) -> tuple[CachedStudy, FrozenTrial]:
        """A trial in its newest form, and its study; a KeyError where there is none."""
        known = self._cache.find(trial_id)
        if known is not None:
            study, trial = known
            if trial.state.is_finished() or self._cache.owned(study.study_id) is study:
                return known
        with reading(self._engine) as connection:
            return self._read_trial(connection, trial_id)

    def _read_trial(self, connection: Connection, trial_id: int) -> tuple[CachedStudy, FrozenTrial]:
        known = self._cache.find(trial_id)
        study_id: int | None
        if known is not None:
            study_id = known[0].study_id
        else:
            query = select(TRIALS.c.study_id).where(TRIALS.c.trial_id == trial_id)
            study_id = connection.execute(query).scalar()
        if study_id is not None:
            self._cache.refresh(connection, study_id)
            known = self._cache.find(trial_id)
        if known is None:
            raise KeyError(f"no trial has the id {trial_id}")
        return known

    def _study_to_change(self, change: Change, study_id: int) -> CachedStudy:
        if change.connection is None:
            study = self._study(study_id)
            self._cache.own(study)
            return study
        lock_study(change.connection, study_id)
        return self._cache.refresh(change.connection, study_id)

    def _trial_to_change(self, change: Change, trial_id: int) -> tuple[CachedStudy, FrozenTrial]:
        if change.connection is None:
            known = self._cache.find(trial_id)
            if known is None or self._cache.owned(known[0].study_id) is not known[0]:
                self._cache.own(self._study(self._trial(trial_id)[0].study_id))
                known = self._trial(trial_id)
            return known
        # Another process may be about to change it; SQLite's write transactions follow one another anyway.
        row_id = self._cache.row_ids.get(trial_id, trial_id)
        query = select(TRIALS.c.trial_id).where(TRIALS.c.trial_id == row_id).with_for_update()
        change.connection.execute(query)
        return self._read_trial(change.connection, trial_id)
