"""Writes our own records of a study: its settings, and each trial's plan, attempts, metrics and units.

Rows go through the storage's queue, so that while batching they are written in the same transaction as their trial.
`queries` reads them back.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hydra_tune.core.errors import StorageError, nearest
from hydra_tune.storage.queued_database import QueuedDatabase
from hydra_tune.storage.rows import storable_name
from hydra_tune.storage.tables import (
    HYDRA_ATTEMPTS,
    HYDRA_CHECKPOINTS,
    HYDRA_EVENTS,
    HYDRA_METRICS,
    HYDRA_SPILLED,
    HYDRA_STUDIES,
    HYDRA_TRIALS,
    HYDRA_UNITS,
    utc_now,
)

TRIAL_COLUMNS = frozenset(column.name for column in HYDRA_TRIALS.columns) - {"study_id", "number"}

RUNNING = "RUNNING"


class StudyRecords:
    """Writer of one study's records. Seeds must be less than 2**63, the largest integer of the database."""

    def __init__(self, storage: QueuedDatabase, study_id: int) -> None:
        self._storage = storage
        self._study_id = study_id

    def describe(
        self,
        seed: int,
        metrics: list[str],
        settings: dict[str, Any],
        spec: dict[str, Any] | None,
        source: str | None = None,
    ) -> None:
        """Record the settings needed to resume the study. A repeated call keeps the creation date."""
        self._storage.upsert(
            HYDRA_STUDIES,
            {
                "study_id": self._study_id,
                "seed": seed,
                **description(metrics, settings),
                "spec": None if spec is None else json.dumps(spec),
                "source": None if source is None else _storable(source),
            },
        )

    def trial(self, number: int, **columns: Any) -> None:
        """Set the given columns of the trial's record and leave the others unchanged."""
        unknown = sorted(columns.keys() - TRIAL_COLUMNS)
        if unknown:
            raise StorageError(f"a trial's record has no {unknown[0]!r}", nearest(unknown[0], TRIAL_COLUMNS))
        row = {name: _storable(value) for name, value in columns.items()}
        self._storage.upsert(HYDRA_TRIALS, {"study_id": self._study_id, "number": number, **row})

    def attempt_started(self, number: int, attempt: int, device: str, pid: int) -> str:
        """Record the start of the trial's `attempt`-th attempt; return the attempt's id."""
        attempt_id = uuid.uuid4().hex
        self._storage.upsert(
            HYDRA_ATTEMPTS,
            {
                "attempt_id": attempt_id,
                "study_id": self._study_id,
                "number": number,
                "attempt": attempt,
                "state": RUNNING,
                "device": device,
                "pid": pid,
                "started": utc_now(),
            },
        )
        return attempt_id

    def attempt_ended(self, attempt_id: str, state: str, error: str = "", traceback: str = "") -> None:
        """Record the end of an attempt."""
        self._storage.update(
            HYDRA_ATTEMPTS,
            {
                "attempt_id": attempt_id,
                "state": state,
                "ended": utc_now(),
                "error": _storable(error),
                "traceback": _storable(traceback),
            },
        )

    def metrics(self, number: int, epoch: int, values: Mapping[str, float]) -> None:
        """Record an epoch's metrics; a repeated epoch replaces the earlier values."""
        for name, value in values.items():
            finite = math.isfinite(value)
            self._storage.upsert(
                HYDRA_METRICS,
                {
                    "study_id": self._study_id,
                    "number": number,
                    "epoch": epoch,
                    "name": storable_name("metric", name),
                    "value": float(value) if finite else None,
                    "special": None if finite else str(float(value)),
                },
            )

    def event(self, number: int | None, kind: str, message: str) -> None:
        """Record an event of a trial, or of the study if `number` is None."""
        row = {"study_id": self._study_id, "number": number, "happened": utc_now(), "kind": kind}
        self._storage.add(HYDRA_EVENTS, {**row, "message": _storable(message)})

    def checkpoint(self, number: int, step: int, size: int, seconds: float) -> None:
        """Record that a checkpoint of `size` bytes was written in `seconds`."""
        row = {"study_id": self._study_id, "number": number, "step": step, "bytes": size, "seconds": seconds}
        self._storage.upsert(HYDRA_CHECKPOINTS, {**row, "made": utc_now()})

    def spilled(self, sampled: float, host_bytes: int, disk_bytes: int) -> None:
        """Record the bytes in the spill store from `sampled` (seconds since 1970) on."""
        row = {"study_id": self._study_id, "sampled": sampled}
        self._storage.upsert(HYDRA_SPILLED, {**row, "host_bytes": host_bytes, "disk_bytes": disk_bytes})

    def unit(
        self,
        number: int,
        attempt_id: str,
        kind: str,
        device: str,
        started: float,
        seconds: float,
        peak_bytes: int | None,
        **of_shard: int,
    ) -> None:
        """Record a unit that ran on a device; `started` is in seconds since 1970.

        For trials in shards, `of_shard` holds `shard`, `read_bytes`, `written_bytes`, and the number of `steps` that
        the record sums up.
        """
        self._storage.add(
            HYDRA_UNITS,
            {
                "study_id": self._study_id,
                "number": number,
                "attempt_id": attempt_id,
                "kind": kind,
                "device": device,
                "started": started,
                "seconds": seconds,
                "peak_bytes": peak_bytes,
                **of_shard,
            },
        )


def _storable(value: Any) -> Any:
    """Return text that every database accepts: messages from user code may contain anything."""
    if not isinstance(value, str):
        return value
    return value.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")


def description(metrics: list[str], settings: dict[str, Any]) -> dict[str, str]:
    """Return the columns that every record of a study has."""
    return {"metrics": json.dumps(metrics), "settings": json.dumps(settings), "version": _own_version()}


def _own_version() -> str:
    try:
        return version("hydra-tune")
    except PackageNotFoundError:
        return "unknown"
