"""Paths of files that outlive a search: weights, checkpoints and measured costs, beside the database.

Paths are made of numbers, never of names that a user chose.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy

from hydra_tune.core.errors import InputError


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


def check_files_directory(storage_url: str) -> None:
    """Raise an InputError if the directory for a database's files cannot be one."""
    wanted = files_directory(storage_url)
    for place in (wanted, *wanted.parents):
        if place.exists() or place.is_symlink():
            if not place.is_dir():
                raise InputError(f"{str(place)!r} is no directory, but weights go there", "rename or remove it")
            return


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

    def kept(self, number: int) -> Path:
        """Return the directory of what a trial's code has kept with `trial.keep`."""
        return self.directory / f"trial-{number}.files"

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
