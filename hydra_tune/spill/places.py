"""Places of the spill store: directories on a tmpfs or on disk, their free space, and each trial's bytes there.

No tensors: the coordinator reads the same places as the workers that fill them (`store.py`).
"""

from __future__ import annotations

import errno
import functools
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hydra_tune.core.errors import HydraTuneError

KEPT_FREE = 0.05
"""Share of every place that stays free."""
LAST_KEPT_FREE = 64 * 2**20
"""Bytes of the last place that stay free, if less: database and checkpoints are often on the same disk."""
MEMORY_KEPT = 0.1
"""Share of the machine's memory that stays available: files on a tmpfs use memory."""
_OF_TRIAL = re.compile(r"trial-(\d+)-")
"""Prefix of directories that hold a trial's files."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SpillFull(HydraTuneError):
    """No place has room for a block."""

    def __init__(self, size: int, places: Sequence[Path]) -> None:
        super().__init__(
            f"there is no room for {size} bytes in {' or '.join(str(place.parent) for place in places)}",
            "make room there, or give another --spill directory; the study can be resumed",
        )


@dataclass(frozen=True)
class Lying:
    """Bytes in a trial's files: on a tmpfs, which is host memory, and on disk."""

    host: int = 0
    disk: int = 0


def lying(places: Sequence[Path]) -> dict[int, Lying]:
    """Return the bytes in the files of each trial, by number, while workers write there.

    A file that is no longer needed counts until it is deleted.
    """
    found: dict[int, Lying] = {}
    for place in places:
        for name in _names_in(place):
            if (match := _OF_TRIAL.match(name)) is None:
                continue
            size, before = _size_of(place / name), found.get(int(match[1]), Lying())
            host, disk = (size, 0) if in_memory(place) else (0, size)
            found[int(match[1])] = Lying(before.host + host, before.disk + disk)
    return found


def remove_directory(directory: Path) -> None:
    """Delete a directory in which others may still create files; renaming it first hides it from them."""
    gone = directory.with_name(f"{directory.name}.gone")
    try:
        directory.rename(gone)
    except FileNotFoundError:
        return
    except OSError:  # such as a leftover directory of that name
        gone = directory
    shutil.rmtree(gone, ignore_errors=True)


def _names_in(place: Path) -> list[str]:
    try:
        return os.listdir(place)
    except FileNotFoundError:
        return []


def _size_of(directory: Path) -> int:
    """Return the bytes of all files below a directory; files that vanish meanwhile do not count."""
    size = 0
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    size += _size_of(Path(entry.path))
                    continue
                try:
                    size += entry.stat(follow_symlinks=False).st_size
                except FileNotFoundError:
                    continue
    except FileNotFoundError:
        return size
    return size


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, or leave nothing behind if there is no space."""
    try:
        path.write_bytes(content)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno not in NO_ROOM:
            raise
        raise SpillFull(len(content), [path.parent]) from error


def has_room(place: Path, size: int, *, last: bool) -> bool:
    """True if a place may take `size` more bytes, by its own budget and on a tmpfs by the machine's memory.

    The last place is filled further: there is no other left.
    """
    facts = os.statvfs(place)
    if not facts.f_blocks:
        return last  # a file system without such figures: used only as the last place
    keep = facts.f_blocks * facts.f_frsize * KEPT_FREE
    if facts.f_bavail * facts.f_frsize - size < (min(keep, LAST_KEPT_FREE) if last else keep):
        return False
    if last or not in_memory(place):
        return True
    available, whole = memory()
    return available - size >= whole * MEMORY_KEPT


@functools.cache
def in_memory(place: Path) -> bool:
    """True if files of that place are in host memory."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return False
    holding = [(len(at), kind) for at, kind in mounts if place.resolve().is_relative_to(at)]
    return bool(holding) and max(holding)[1] in ("tmpfs", "ramfs")


def memory() -> tuple[int, int]:
    """Return the machine's available and total memory in bytes."""
    facts = psutil.virtual_memory()
    return facts.available, facts.total
