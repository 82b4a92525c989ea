"""Who runs a study: a lease, so that two coordinators cannot run the same one.

A lease names a process on a host. On the same host it is free as soon as that process is dead; from another host nobody
can tell, so there it is free when it has not been renewed for a while.
"""

from __future__ import annotations

import os
import socket
import sys
import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import psutil
from sqlalchemy import Connection, delete, insert, select, update

from hydra_tune.errors import StorageError
from hydra_tune.storage.database import writing
from hydra_tune.storage.optuna_storage import HydraStorage
from hydra_tune.storage.tables import HYDRA_LEASES, utc_now

RENEW_SECONDS = 10.0
STALE_AFTER = timedelta(seconds=60)


@dataclass(frozen=True)
class Lease:
    """A study's holder, as it stands in the database."""

    study_id: int
    holder: str
    host: str
    pid: int
    process_started: float
    taken: datetime
    renewed: datetime

    def held(self) -> bool:
        """Whether somebody still runs the study."""
        if self.host != this_host():
            return utc_now() - self.renewed < STALE_AFTER
        return process_runs(self.pid, self.process_started)


def this_host() -> str:
    """A name for this host, this boot and this container: process numbers mean nothing beyond."""
    name = socket.gethostname()
    if sys.platform != "linux":
        return name
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{name} ({boot[:8]}-{os.stat('/proc/self/ns/pid').st_ino})"


def process_start(pid: int) -> float | None:
    """When a process started, in a measure that does not move with the clock; None where it does not run."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        if sys.platform != "linux":
            return float(process.create_time())
        # Clock ticks since boot: the 22nd field, the 20th after the name, which may hold anything but ends with ")".
        return float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
        return None


def process_runs(pid: int, started: float) -> bool:
    """Whether this very process still runs on this host."""
    return process_start(pid) == started


class HeldLease:
    """The lease of this process on a study."""

    def __init__(self, storage: HydraStorage, study_id: int, name: str) -> None:
        """Take the lease; a StorageError names who has it."""
        self._storage = storage
        self._study_id = study_id
        self._holder = uuid.uuid4().hex
        with writing(storage.engine) as connection:
            found = read_lease(connection, study_id)
            if found is not None and found.held():
                age = (utc_now() - found.taken).total_seconds()
                raise StorageError(
                    f"study {name!r} is being run by process {found.pid} on {found.host} since {age:.0f} s",
                    "wait for it to end, or stop it first",
                )
            connection.execute(delete(HYDRA_LEASES).where(HYDRA_LEASES.c.study_id == study_id))
            connection.execute(insert(HYDRA_LEASES).values(**self._row(), taken=utc_now()))

    def _row(self) -> dict[str, object]:
        return {
            "study_id": self._study_id, "holder": self._holder, "host": this_host(), "pid": os.getpid(),
            "process_started": process_start(os.getpid()), "renewed": utc_now(),
        }  # fmt: skip

    def renew(self) -> None:
        """Say that this process still runs the study; a StorageError where another has taken it over."""
        with writing(self._storage.engine) as connection:
            ours = (HYDRA_LEASES.c.study_id == self._study_id) & (HYDRA_LEASES.c.holder == self._holder)
            renewed = connection.execute(update(HYDRA_LEASES).where(ours).values(renewed=utc_now()))
        if renewed.rowcount == 0:
            raise StorageError("another process has taken this study over", "let that one finish, then resume")

    def release(self) -> None:
        """Let go of the study."""
        with writing(self._storage.engine) as connection:
            ours = (HYDRA_LEASES.c.study_id == self._study_id) & (HYDRA_LEASES.c.holder == self._holder)
            connection.execute(delete(HYDRA_LEASES).where(ours))


def read_lease(connection: Connection, study_id: int) -> Lease | None:
    """The lease on a study, if there is one."""
    row = connection.execute(select(HYDRA_LEASES).where(HYDRA_LEASES.c.study_id == study_id)).one_or_none()
    return None if row is None else Lease(**row._mapping)


def read_leases(connection: Connection) -> list[Lease]:
    """All leases, held and stale."""
    return [Lease(**row._mapping) for row in connection.execute(select(HYDRA_LEASES))]
