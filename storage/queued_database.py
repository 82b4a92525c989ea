"""A database with a read cache and a write queue, the base of `HydraStorage`.

There are two ways to write, chosen by `batching`:

- **Write-through**, the default: every change is a separate transaction, and any number of processes may work on one
  study.
- **Batching**, for the one process that owns a study: changes go to the cache and wait in a queue, and `flush` writes
  all of them in one transaction. A crash loses either none or all of a flush.

This class finds and changes trials and studies; Optuna's storage interface is in `optuna_storage`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Self

from optuna.trial import FrozenTrial
from sqlalchemy import Connection, Engine, Table, select

from hydra_tune.core.errors import StorageError
from hydra_tune.storage.cache import Cache, CachedStudy
from hydra_tune.storage.database import address, connect, masked, reading, writing
from hydra_tune.storage.schema import check_schema, ensure_schema
from hydra_tune.storage.tables import TRIALS
from hydra_tune.storage.write_queue import UNSTORABLE, RefusedRow, WriteQueue, lock_study

# Provisional ids count up from here: negative, unlike every real id, and within PostgreSQL's integers.
FIRST_PROVISIONAL_ID = -(2**31)


@dataclass
class Change:
    """Rows that are written in one transaction. `connection` is None while batching."""

    rows: WriteQueue
    connection: Connection | None = None
    new_ids: dict[int, int] = field(default_factory=dict)


@dataclass
class TrialEdit:
    """A change of one trial: `trial` is its newer version, `rows` the matching database rows."""

    study: CachedStudy
    trial: FrozenTrial
    rows: WriteQueue

    def upsert(self, table: Table, row: Mapping[str, Any]) -> None:
        """Write a row that belongs to the trial."""
        self.rows.upsert(table, {"trial_id": self.trial._trial_id, **row})


class QueuedDatabase:
    """A database engine with its cache and queue; thread-safe, but not usable across a fork."""

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
        self.fence: Callable[[Connection], None] | None = None
        """Called first in each transaction that writes; raises to prevent it."""
        self._refused: list[RefusedRow] = []
        self._unsure = False
        """True if the last flush failed, perhaps after its commit: a connection may break before the answer."""
        self.shared = False
        """True once another process has changed a study that this one owns: the database then numbers new trials."""
        self._from_outside: list[FrozenTrial] = []
        self._unread_reports: dict[int, dict[int, float]] = {}
        """Reports of a trial that were copied and not read since: further reports are added without another copy."""
        self._provisional_ids = count(FIRST_PROVISIONAL_ID)
        # `_lock` guards the cache and the queue; `_flush_lock` lets one flush run at a time. A flush takes `_lock` only
        # at its start and end, so that a slow disk does not block readers. Never wait for `_flush_lock` while holding
        # `_lock`.
        self._lock = threading.RLock()
        self._flush_lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        self.flush()  # A copy starts from the database's contents only.
        return {"url": self.url, "read_only": self.read_only}

    def __setstate__(self, state: dict[str, Any]) -> None:
        QueuedDatabase.__init__(self, state["url"], read_only=state["read_only"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        """The SQLAlchemy engine, for the caller's own transactions, which bypass the queue."""
        return self._engine

    @property
    def url(self) -> str:
        """The full URL with its password; use `masked` for messages."""
        return address(self._engine)

    @property
    def has_hydra_tables(self) -> bool:
        """True if the `hydra_` tables exist: a database written only by plain Optuna lacks them."""
        self._has_hydra_tables = self._has_hydra_tables or check_schema(self._engine)
        return self._has_hydra_tables

    @property
    def pending(self) -> int:
        """Number of rows waiting to be written."""
        with self._lock:
            return len(self._queue) + len(self._in_flight)

    def close(self) -> None:
        """Flush the queue and close all connections. A later use connects again."""
        try:
            self.flush()
        finally:
            self._engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Open a read transaction for the caller's own queries, after flushing the queue."""
        self.flush()
        with reading(self._engine) as connection:
            yield connection

    @contextmanager
    def batching(self) -> Iterator[None]:
        """Queue the writes of the block and flush them at its end, also after an exception."""
        self.begin_batching()
        try:
            yield
        finally:
            self.end_batching()

    def begin_batching(self) -> None:
        """Queue writes until `flush` from now on. A study written meanwhile must have no other writer."""
        with self._lock:
            self._refuse_if_read_only()
            self._batching = True

    def end_batching(self) -> None:
        """Flush, then return to write-through; if the flush fails, batching continues and nothing is lost."""
        with self._flush_lock, self._lock:
            self.flush()
            self._batching = False
            self._cache.share_all()

    def discard(self) -> None:
        """Drop all queued writes, because another process now owns the study."""
        with self._flush_lock, self._lock:
            self._queue = WriteQueue()

    def flush(self) -> None:
        """Write the whole queue in one transaction; on failure raise a StorageError and keep the queue."""
        with self._flush_lock:
            with self._lock:
                if not self._queue:
                    return
                batch, self._queue = self._queue, WriteQueue()
                self._in_flight = batch
                last_ids = self._cache.last_row_ids(batch.studies_of_new_trials())
            try:
                ids = self._write(batch, last_ids)
            except BaseException:
                with self._lock:
                    batch.extend(self._queue)
                    self._queue, self._in_flight = batch, WriteQueue()
                    self._unsure = True
                raise
            with self._lock:
                self._cache.learn_row_ids(ids)
                self._in_flight = WriteQueue()
                self._unsure = False
                for study_id, foreign in batch.foreign.items():
                    owned = self._cache.owned(study_id) if foreign else None
                    if owned is not None:
                        with reading(self._engine) as connection:
                            self._note_outside(self._cache.take_in(connection, owned, foreign))

    def _write(self, batch: WriteQueue, last_ids: Mapping[int, int]) -> dict[int, int]:
        """Write a batch in one transaction, without the rows that no database could store."""
        try:
            with self._fenced() as connection:
                if self._unsure and self.fence is not None:
                    batch.find_committed(connection, last_ids)
                return batch.write(connection, self._cache.row_ids, last_ids)
        except UNSTORABLE:
            with self._fenced() as connection:
                ids, refused = batch.write_singly(connection, self._cache.row_ids, last_ids)
            with self._lock:
                self._refused += refused
            return ids

    def take_refused(self) -> list[RefusedRow]:
        """Return the rows that could not be stored since the last call."""
        with self._lock:
            refused, self._refused = self._refused, []
        return refused

    def number_of(self, trial_id: int) -> int | None:
        """Return the number of a cached trial."""
        known = self._cache.find(trial_id)
        return None if known is None else known[1].number

    @contextmanager
    def _fenced(self) -> Iterator[Connection]:
        with writing(self._engine) as connection:
            if self.fence is not None:
                self.fence(connection)
            yield connection

    def take_in(self, study_id: int) -> list[FrozenTrial]:
        """Read what other processes wrote to a study while this one owns it; return the trials that they changed."""
        with self._flush_lock, self._lock:
            self.flush()
            owned = self._cache.owned(study_id)
            if owned is not None:
                with reading(self._engine) as connection:
                    self._note_outside(self._cache.take_in(connection, owned))
            found, self._from_outside = self._from_outside, []
            # A flush may have seen one already: its newest form counts.
            return list({trial._trial_id: trial for trial in found}.values())

    def _note_outside(self, trials: list[FrozenTrial]) -> None:
        self._from_outside += trials
        self.shared = self.shared or bool(trials)

    @contextmanager
    def _at_once(self, wanted: bool) -> Iterator[None]:
        """Write the changes of the block through while batching, if wanted: other processes must see them at once."""
        if not (wanted and self._batching):
            yield
            return
        with self._flush_lock, self._lock:
            self.flush()
            self._batching = False
            try:
                yield
            finally:
                self._batching = True

    def add(self, table: Table, row: Mapping[str, Any]) -> None:
        """Insert a row into a `hydra_` table, in the same queue and transaction as the trials."""
        with self._changing(at_once=True) as change:
            change.rows.add(table, row)

    def upsert(self, table: Table, row: Mapping[str, Any]) -> None:
        """Insert a row into a `hydra_` table, or change the given columns of the row with the same key."""
        with self._changing(at_once=True) as change:
            change.rows.upsert(table, row)

    def update(self, table: Table, row: Mapping[str, Any]) -> None:
        """Change the given columns of the row with this primary key in a `hydra_` table."""
        with self._changing(at_once=True) as change:
            change.rows.update(table, row)

    def _refuse_if_read_only(self) -> None:
        if self.read_only:
            raise StorageError(f"database {masked(self.url)} was opened to read", "open it without read_only")

    @contextmanager
    def _changing(self, *, at_once: bool = False) -> Iterator[Change]:
        """Collect rows; at the block's end, queue them while batching, else write them to the database.

        `at_once` is for a block that cannot raise after its first row: its rows go straight to the queue.
        """
        with self._lock:
            self._refuse_if_read_only()
            if self._batching and at_once:
                yield Change(self._queue)
                return
            change = Change(WriteQueue())
            if self._batching:
                yield change
                self._queue.extend(change.rows)
                return
            with self._fenced() as change.connection:
                yield change
                last_ids = self._cache.last_row_ids(change.rows.studies_of_new_trials())
                change.new_ids = change.rows.write(change.connection, self._cache.row_ids, last_ids)

    @contextmanager
    def _editing(self, trial_id: int) -> Iterator[TrialEdit]:
        """Change one trial; the cache is updated once the rows are committed or queued.

        The block raises before it changes a row, or not at all.
        """
        with self._lock:
            with self._changing(at_once=True) as change:
                study, trial = self._trial_to_change(change, trial_id)
                edit = TrialEdit(study, trial, change.rows)
                yield edit
            if edit.trial is not trial:
                self._cache.put(study, edit.trial)
                study.learn_distributions(edit.trial)

    def _study(self, study_id: int) -> CachedStudy:
        """Return the study with up-to-date trials; raise a KeyError if there is none."""
        owned = self._cache.owned(study_id)
        if owned is not None:
            return owned
        with reading(self._engine) as connection:
            return self._cache.refresh(connection, study_id)

    def _trial(self, trial_id: int) -> tuple[CachedStudy, FrozenTrial]:
        """Return an up-to-date trial and its study; raise a KeyError if there is none."""
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
        study = self._cache.refresh(change.connection, study_id)
        if self._cache.owned(study_id) is not None:
            self._note_outside(self._cache.take_in(change.connection, study))
        return study

    def _trial_to_change(self, change: Change, trial_id: int) -> tuple[CachedStudy, FrozenTrial]:
        if change.connection is None:
            known = self._cache.find(trial_id)
            if known is None or self._cache.owned(known[0].study_id) is not known[0]:
                self._cache.own(self._study(self._trial(trial_id)[0].study_id))
                known = self._trial(trial_id)
            return known
        # Lock the row against other processes; on SQLite, write transactions are serial anyway.
        row_id = self._cache.row_ids.get(trial_id, trial_id)
        query = select(TRIALS.c.trial_id).where(TRIALS.c.trial_id == row_id).with_for_update()
        change.connection.execute(query)
        study, _ = self._read_trial(change.connection, trial_id)
        if self._cache.owned(study.study_id) is not None:
            self._note_outside(self._cache.take_in(change.connection, study))
        return self._read_trial(change.connection, trial_id)
