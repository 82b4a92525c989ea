"""Read access of the routes: one read-only storage, and a cached view of each study."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy import Connection, select

from hydra_tune.core.errors import StorageError
from hydra_tune.storage import HydraStorage, open_storage
from hydra_tune.storage.columns import StudyColumns
from hydra_tune.storage.details import Described, described, pool
from hydra_tune.storage.leases import Lease, read_lease
from hydra_tune.storage.tables import STUDIES
from hydra_tune.storage.timeline import SpillLog, Work

T = TypeVar("T")
logger = logging.getLogger(__name__)

MOST_KEPT = 12
"""Most results kept of one study; addresses with other parameters take the place of the least used."""
LOCKS = 64
"""Locks that studies share, by id: a visitor may ask for any id."""
FRESH_SECONDS = 0.25
"""Seconds for which a view is not read again: a page sends several requests at once."""


class NoSuchStudy(KeyError):
    """No study has this id."""


class NoSuchTrial(KeyError):
    """The study has no trial of this number."""


@dataclass
class StudyView:
    """A cached study. Use it through `Reader.study`, which holds its lock."""

    columns: StudyColumns
    work: Work
    spilled: SpillLog
    described: Described | None = None
    lease: Lease | None = None
    pool: dict[str, int] = field(default_factory=dict)
    read_at: float = 0.0
    _kept: dict[Any, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the objectives."""
        if self.described is not None:
            return self.described.metrics
        objectives = len(self.columns.maximize)
        return ("value",) if objectives == 1 else tuple(f"value_{i}" for i in range(objectives))

    @property
    def worked(self) -> tuple[int, int]:
        """A version that changes with every unit and every change of the spill store."""
        return self.work.last_unit, len(self.spilled.moments)

    @property
    def running(self) -> bool:
        return self.lease is not None and self.lease.held()

    def check_trial(self, number: int) -> int:
        if not 0 <= number < self.columns.size:
            raise NoSuchTrial(number)
        return number

    def kept(self, key: Any, compute: Callable[[], T], version: Any = None) -> T:
        """Return the result of `compute`, cached until the trials (or `version`) change."""
        version = self.columns.version if version is None else version
        found: T | None = self.known(key, version)
        if found is None:
            found = compute()
            self.keep(key, version, found)
        return found

    def known(self, key: Any, version: Any) -> Any:
        """Return the cached result of this key and version, or None."""
        kept = self._kept.pop(key, None)
        if kept is None or kept[0] != version:
            return None
        self._kept[key] = kept  # the newest again
        return kept[1]

    def keep(self, key: Any, version: Any, result: Any) -> None:
        self._kept.pop(key, None)
        self._kept[key] = (version, result)
        while len(self._kept) > MOST_KEPT:
            self._kept.pop(next(iter(self._kept)))


class Reader:
    """The database, read-only; safe to use from many threads."""

    def __init__(self, url: str) -> None:
        self.storage: HydraStorage = open_storage(url, read_only=True)
        self._views: dict[int, StudyView] = {}
        self._locks = [threading.RLock() for _ in range(LOCKS)]
        self._closed = threading.Event()
        self._ahead: threading.Thread | None = None

    def close(self) -> None:
        self._closed.set()
        if self._ahead is not None:
            self._ahead.join()
        self.storage.close()

    def read_ahead(self) -> None:
        """Read all studies on a separate thread, newest first, so that no visitor waits for the first read."""
        if self._ahead is not None:
            return

        def read() -> None:
            for study_id in reversed(self.study_ids()):
                if self._closed.is_set():
                    return
                try:
                    with self.study(study_id) as view:
                        logger.debug("read %d trials ahead", view.columns.size)
                except (NoSuchStudy, StorageError) as error:
                    logger.info("study %d could not be read ahead: %s", study_id, error)

        self._ahead = threading.Thread(target=read, name="hydra-read-ahead", daemon=True)
        self._ahead.start()

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """Open a transaction for reading."""
        with self.storage.reading() as connection:
            yield connection

    def study_ids(self) -> list[int]:
        with self.connection() as connection:
            return list(connection.execute(select(STUDIES.c.study_id).order_by(STUDIES.c.study_id)).scalars())

    def study_id(self, name: str) -> int:
        from hydra_tune.storage.queries import find_study

        return find_study(self.storage, name)

    @contextmanager
    def study(self, study_id: int) -> Iterator[StudyView]:
        """Yield the current study under its lock. Raises NoSuchStudy."""
        with self._locks[study_id % LOCKS]:
            yield self._refreshed(study_id)

    @contextmanager
    def study_and_work(self, study_id: int) -> Iterator[tuple[StudyView, Connection]]:
        """Yield the study with the totals of its units and the spill log, which only device and live pages need."""
        with self.study(study_id) as view, self.connection() as connection:
            if self.storage.has_hydra_tables:
                view.work.refresh(connection)
                view.spilled.refresh(connection)
            yield view, connection

    def _refreshed(self, study_id: int) -> StudyView:
        view = self._views.get(study_id)
        if view is not None and time.monotonic() - view.read_at < FRESH_SECONDS:
            return view
        with self.connection() as connection:
            try:
                if view is not None:
                    view.columns.refresh(connection)
            except KeyError:
                # Deleted, or replaced by another study with the same id.
                view = None
                self._views.pop(study_id, None)
            try:
                view = view or self._read(connection, study_id)
            except KeyError:
                raise NoSuchStudy(study_id) from None
            if self.storage.has_hydra_tables:
                view.described = described(connection, study_id)
                view.lease = read_lease(connection, study_id)
                view.pool = pool(connection, study_id)
        view.read_at = time.monotonic()
        return view

    def _read(self, connection: Connection, study_id: int) -> StudyView:
        columns = StudyColumns(connection, study_id, self.storage.has_hydra_tables)
        view = self._views[study_id] = StudyView(columns, Work(study_id), SpillLog(study_id))
        return view
