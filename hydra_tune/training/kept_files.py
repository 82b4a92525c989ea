"""Files that an objective keeps with its trial: `trial.keep(path)` copies a file or a folder beside the database.

They stay while the trial is among the best of its study, as weights of candidates do; the coordinator removes others.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from hydra_tune.core.errors import InputError, quoted

PARTIAL = ".partial-"
"""Prefix of a copy that is not complete."""


def keep_file(path: str | os.PathLike[str], directory: Path, name: str | None = None) -> Path:
    """Copy a file or a folder into `directory`, in place of an earlier one of that name; return the copy's path."""
    source = Path(path)
    name = source.resolve().name if name is None else name
    if not name or name in (".", "..") or "/" in name or "\0" in name or name.startswith(PARTIAL):
        raise InputError(f"a kept file cannot be named {quoted(name)}", "give a name without folders")
    if not source.exists():
        raise FileNotFoundError(f"trial.keep: there is no {str(source)!r}")
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f"{PARTIAL}{name}"
    remove(partial)
    try:
        if source.is_dir():
            shutil.copytree(source, partial)
        else:
            shutil.copyfile(source, partial)
    except BaseException:
        remove(partial)
        raise
    kept = directory / name
    if kept.is_dir() or partial.is_dir():
        remove(kept)  # only a file replaces a file in one step
    partial.rename(kept)
    return kept


def kept_files(directory: Path) -> list[Path]:
    """Return what a trial has kept, by name."""
    if not directory.is_dir():
        return []
    return sorted(each for each in directory.iterdir() if not each.name.startswith(PARTIAL))


def remove(path: Path) -> None:
    """Remove a file or a folder, if present."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
