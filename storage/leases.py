"""Leases on studies, which prevent two coordinators from running the same study.

A lease names a process on a host. On the same host the lease is free as soon as that process is dead. Another host
cannot check the process, so there the lease is free after it has not been renewed for `STALE_AFTER`. Lease times are
the database's: on a server, the clocks of two hosts may differ by more than that.

A holder that was suspended may wake after another has taken over. So every transaction of the holder's storage checks
the lease first (`QueuedDatabase.fence`), by the holder's own number: a former holder's queued rows are never written.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import psutil
from sqlalchemy import ColumnElement, Connection, delete, func, insert, select, update

from hydra_tune.core.errors import StorageError
from hydra_tune.storage.database import writing
from hydra_tune.storage.optuna_storage import HydraStorage
from hydra_tune.storage.tables import HYDRA_LEASES, utc_now
from hydra_tune.storage.write_queue import lock_study

logger = logging.getLogger(__name__)

RENEW_SECONDS = 10.0
STALE_AFTER = timedelta(seconds=60)


@dataclass(frozen=True)
class Lease:
    """A study's lease as stored in the database."""

    study_id: int
    holder: str
    host: str
    pid: int
    process_started: float
    taken: datetime
    renewed: datetime
    read: datetime
    """The database's time when the lease was read."""

    def held(self) -> bool:
        """True if the lease's process still runs the study."""
        if self.host != this_host():
            return self.read - self.renewed < STALE_AFTER
        return process_runs(self.pid, self.process_started)


def this_host() -> str:
    """Return a name for this host, boot and container, within which process ids are unique."""
    name = socket.gethostname()
    if sys.platform != "linux":
        return name
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{name} ({boot[:8]}-{os.stat('/proc/self/ns/pid').st_ino})"


def process_start(pid: int) -> float | None:
    """Return a process's start time, independent of clock changes; None if the process does not run."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        if sys.platform != "linux":
            return float(process.create_time())
        # Field 22 is the start in clock ticks since boot: the 20th after the name, which may hold anything but ends
        # with ")".
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return None


def process_runs(pid: int, started: float) -> bool:
    """True if the process with this id and start time still runs on this host."""
    return process_start(pid) == started


def this_process() -> dict[str, object]:
    """Return the host, the id and the start time of this process."""
    return {"host": this_host(), "pid": os.getpid(), "process_started": process_start(os.getpid())}


class HeldLease:
    """The lease of this process on a study."""

    def __init__(self, storage: HydraStorage, study_id: int, name: str) -> None:
        """Take the lease; raise a StorageError that names the holder if another process has it."""
        self._storage = storage
        self._study_id = study_id
        self._holder = uuid.uuid4().hex
        self._lost: StorageError | None = None
        self._released = threading.Event()
        self._renewing = threading.Lock()
        self._thread: threading.Thread | None = None
        with writing(storage.engine) as connection:
            lock_study(connection, study_id)  # one at a time may take over
            found = read_lease(connection, study_id)
            if found is not None and found.held():
                age = (found.read - found.taken).total_seconds()
                raise StorageError(
                    f"study {name!r} is being run by process {found.pid} on {found.host} since {age:.0f} s",
                    "wait for it to end, or stop it first",
                )
            connection.execute(delete(HYDRA_LEASES).where(HYDRA_LEASES.c.study_id == study_id))
            connection.execute(insert(HYDRA_LEASES).values(**self._row(_now(connection))))
        self._renewed = _clock()
        storage.fence = self.check_within

    def _row(self, now: datetime) -> dict[str, object]:
        return {
            "study_id": self._study_id, "holder": self._holder, **this_process(), "taken": now, "renewed": now,
        }  # fmt: skip

    def keep(self) -> None:
        """Keep renewing the lease on a separate thread, so that slow work elsewhere cannot lose it."""
        self._thread = threading.Thread(target=self._renew_until_released, name="hydra-lease", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> bool:
        """True once another process is known to have taken the study over."""
        return self._lost is not None

    def check(self) -> None:
        """Raise a StorageError if another process has taken the study over.

        Asks the database if the renewing thread has not done so for a while, for example after this process or the
        machine was suspended.
        """
        if self._lost is None and _clock() - self._renewed > 2 * RENEW_SECONDS:
            self.renew()
        if self._lost is not None:
            raise self._lost

    def check_within(self, connection: Connection) -> None:
        """Raise a StorageError, within a transaction that writes, if another process has taken the study over.

        The lease's row is locked until the transaction ends: nobody can take over in between.
        """
        held = select(HYDRA_LEASES.c.holder).where(self._ours).with_for_update()
        if connection.execute(held).scalar() is None:
            raise self._taken_over()

    def _taken_over(self) -> StorageError:
        self._lost = StorageError("another process has taken this study over", "let that one finish, then resume")
        return self._lost

    def renew(self) -> None:
        """Renew the lease; raise a StorageError if another process has taken the study over."""
        with self._renewing:
            with writing(self._storage.engine) as connection:
                renewed = connection.execute(update(HYDRA_LEASES).where(self._ours).values(renewed=_now(connection)))
            if renewed.rowcount == 0:
                raise self._taken_over()
            self._renewed = _clock()

    def release(self) -> None:
        """Release the lease and stop renewing it."""
        self._released.set()
        self._storage.fence = None
        if self._thread is not None:
            self._thread.join()
        with writing(self._storage.engine) as connection:
            connection.execute(delete(HYDRA_LEASES).where(self._ours))

    @property
    def _ours(self) -> ColumnElement[bool]:
        return (HYDRA_LEASES.c.study_id == self._study_id) & (HYDRA_LEASES.c.holder == self._holder)

    def _renew_until_released(self) -> None:
        while self._lost is None and not self._released.wait(RENEW_SECONDS):
            try:
                self.renew()
            except StorageError as error:
                # Either the lease is lost, which `check` raises at the next write, or the database is away and may come
                # back in time.
                logger.warning("the lease could not be renewed: %s", error)


def read_lease(connection: Connection, study_id: int) -> Lease | None:
    """Return the lease on a study, or None."""
    return next((lease for lease in read_leases(connection) if lease.study_id == study_id), None)


def read_leases(connection: Connection) -> list[Lease]:
    """Return all leases, held and stale."""
    now = _now(connection)
    return [Lease(**row._mapping, read=now) for row in connection.execute(select(HYDRA_LEASES))]


def _clock() -> float:
    """Return seconds that also pass while the machine is suspended, where the system has such a clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _now(connection: Connection) -> datetime:
    """Return the UTC time by the database's clock: the server's, or this host's for a SQLite file."""
    if connection.dialect.name == "sqlite":
        return utc_now()
    if connection.dialect.name == "mysql":
        at_server: datetime = connection.execute(select(func.utc_timestamp(6))).scalar_one()
        return at_server
    now: datetime = connection.execute(select(func.timezone("UTC", func.clock_timestamp()))).scalar_one()
    return now
