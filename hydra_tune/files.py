"""Where files go: trained weights beside the database, and what processes hand to each other in shared memory.

Paths are made of numbers, never of names that a user chose.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra_tune.errors import InputError

SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_MEMORY = 512 * 2**20


def files_directory(storage_url: str) -> Path:
    """The directory for the files that belong to a database: beside an SQLite file, else in the current folder."""
    scheme, _, rest = storage_url.partition("///")
    if scheme.startswith("sqlite") and rest and not rest.startswith(":memory:"):
        database = Path(rest.partition("?")[0])
        return database.with_name(f"{database.stem}_files")
    return Path("hydra_tune_files")


def weights_path(storage_url: str, study_id: int, number: int) -> Path:
    """Where a trial's trained weights are."""
    return files_directory(storage_url).resolve() / f"study-{study_id}" / f"trial-{number}.safetensors"


@contextmanager
def run_directory(spill: str | None) -> Iterator[str]:
    """A directory for the life of one search: in shared memory while that has room, else on disk."""
    try:
        directory = tempfile.mkdtemp(prefix=f"hydra-tune-{os.getpid()}-", dir=spill or _roomy_place())
    except OSError as error:
        raise InputError(f"no directory can be made in {spill!r} ({error.strerror})", "give another --spill") from error
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _roomy_place() -> str | None:
    usable = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
    roomy = usable and shutil.disk_usage(SHARED_MEMORY).free >= LEAST_SHARED_MEMORY
    return str(SHARED_MEMORY) if roomy else None
