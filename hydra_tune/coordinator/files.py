"""Paths of files: weights and checkpoints beside the database, data exchanged by processes in shared memory.

Paths are made of numbers, never of names that a user chose.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy

from hydra_tune.core.errors import InputError
from hydra_tune.storage.leases import process_runs, process_start

SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_MEMORY = 512 * 2**20
_RUN = re.compile(r"hydra-tune-run-(\d+)-(\d+)-.*")


def files_directory(storage_url: str, recorded: str | None = None) -> Path:
    """Return the directory for the files that belong to a database.

    For SQLite it is beside the file. For a server it is the directory recorded with the study if that exists, else in
    the current folder.
    """
    url = sqlalchemy.make_url(storage_url)
    if url.get_backend_name() == "sqlite" and url.database:
        database = Path(url.database)
        return database.with_name(f"{database.stem if database.suffix == '.db' else database.name}_files").resolve()
    if recorded is not None and Path(recorded).is_dir():
        return Path(recorded)
    where = f"{url.host or url.query.get('host')}:{url.port}/{url.database}"
    return Path("hydra_tune_files").resolve() / hashlib.sha256(where.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class StudyFiles:
    """The files of one study."""

    directory: Path

    @classmethod
    def of(cls, storage_url: str, study_id: int, settings: Mapping[str, Any]) -> StudyFiles:
        """Return the files of a study with these recorded settings."""
        return cls(files_directory(storage_url, settings.get("files")) / f"study-{study_id}")

    def record(self, storage_url: str) -> dict[str, str]:
        """Return the directory setting to record with the study; empty beside a SQLite file, so that both can move."""
        beside = sqlalchemy.make_url(storage_url).get_backend_name() == "sqlite"
        return {} if beside else {"files": str(self.directory.parent)}

    def weights(self, number: int) -> Path:
        """Return the file of a trial's trained weights."""
        return self.directory / f"trial-{number}.safetensors"

    def checkpointed(self) -> list[int]:
        """Return the numbers of trials that have checkpoints."""
        names = (entry.name for entry in self.directory.glob("*.checkpoints"))
        return [int(match[1]) for name in names if (match := re.fullmatch(r"trial-(\d+)\.checkpoints", name))]

    @property
    def profiles(self) -> Path:
        """Directory of the measured costs of models, for all studies of the database."""
        return self.directory.parent / "profiles"

    def checkpoints(self, number: int) -> Path:
        """Return the directory of a running trial's checkpoints."""
        return self.directory / f"trial-{number}.checkpoints"


@contextmanager
def run_directories(spill: str | None) -> Iterator[tuple[str, ...]]:
    """Create directories for one search, the first in shared memory if there is room, the last on disk.

    A directory that the user names is the only one. Directories of killed searches are removed first.
    """
    _check_current_folder()
    default = [*([str(SHARED_MEMORY)] if _is_roomy() else []), tempfile.gettempdir()]
    places = [str(spill)] if spill else default
    made: list[str] = []
    try:
        for place in places:
            for abandoned in abandoned_directories(Path(place)):
                shutil.rmtree(abandoned, ignore_errors=True)
            made.append(_make_directory(place))
        yield tuple(made)
    finally:
        for directory in made:
            shutil.rmtree(directory, ignore_errors=True)


def _check_current_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise InputError("the current folder has been removed", "change to one that is there") from error


def _make_directory(place: str) -> str:
    prefix = f"hydra-tune-run-{os.getpid()}-{process_start(os.getpid()):.0f}-"
    try:
        return tempfile.mkdtemp(prefix=prefix, dir=place)
    except OSError as error:
        raise InputError(f"no directory can be made in {place!r} ({error.strerror})", "give another --spill") from error


def abandoned_directories(place: Path) -> list[Path]:
    """Return the directories of searches whose process is gone."""
    found = []
    for entry in place.iterdir() if place.is_dir() else ():
        match = _RUN.fullmatch(entry.name)
        ours = match and entry.is_dir() and not entry.is_symlink() and entry.stat().st_uid == os.getuid()
        if match and ours and not process_runs(int(match[1]), float(match[2])):
            found.append(entry)
    return found


def _is_roomy() -> bool:
    usable = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
    return usable and shutil.disk_usage(SHARED_MEMORY).free >= LEAST_SHARED_MEMORY
