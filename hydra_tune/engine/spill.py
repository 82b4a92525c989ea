"""The spill store's files: blocks of bytes by key, each in two slots, committed together.

A trial's blocks (parameters, optimizer state, buffers, activations) live in files of the run's directories: first in
host memory (a tmpfs) while that has room, then on disk. A block is written to the slot that the last commit does not
name, and `commit` names all new slots at once by renaming one small index file. A process that is killed in the middle
of a write, or between two commits, leaves the state of the last commit whole; whoever opens the files next sees that.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import shutil
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from hydra_tune.errors import HydraTuneError

KEPT_FREE = 0.05
"""This share of every place stays free."""
LAST_KEPT_FREE = 64 * 2**20
"""Bytes of the last place that stay free, if that is less: database and checkpoints are often on the same disk."""
MEMORY_KEPT = 0.1
"""This share of the machine's memory stays available: what lies on a tmpfs takes it from everybody."""
_INDEX = "index.json"
MOST_OPEN = 64
"""Files that stay open, of one trial."""
_OF_TRIAL = re.compile(r"trial-(\d+)-")
"""How the names begin of directories that hold a trial's files."""


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SpillFull(HydraTuneError):
    """No place has room for a block."""

    def __init__(self, size: int, places: Sequence[Path]) -> None:
        super().__init__(
            f"there is no room for {size} bytes in {' or '.join(str(place.parent) for place in places)}",
            "make room there, or give another --spill directory; the study can be resumed",
        )


@dataclass(frozen=True)
class Stored:
    """Where a block's bytes are."""

    place: int
    slot: int
    size: int
    version: int


class SpillFiles:
    """The files of one trial, in a directory of that name in each place; the first place with room takes a new block.

    One process at a time writes; another may take over after a commit, by `reload`.
    """

    def __init__(self, places: Sequence[Path], name: str) -> None:
        self._places = [Path(place) for place in places]
        self.places = [place / name for place in self._places]
        self.written_bytes = 0
        self.read_bytes = 0
        self._descriptors: dict[str, int] = {}
        weakref.finalize(self, _close_all, self._descriptors)
        self._opening = threading.Lock()
        self._committed: dict[str, Stored] = {}
        self._working: dict[str, Stored | None] = {}
        """What has changed since the last commit; None for a block that was deleted."""
        self.notes: Any = None
        """What the last commit said besides."""
        self.reload()

    def reload(self) -> None:
        """Take up the state of the last commit, whoever made it."""
        self._working.clear()
        try:
            index = json.loads((self.places[0] / _INDEX).read_bytes())
        except FileNotFoundError:
            self._committed, self.notes = {}, None
            return
        self._committed = {key: Stored(**stored) for key, stored in index["blocks"].items()}
        self.notes = index["notes"]

    def find(self, key: str) -> Stored | None:
        """The newest version of a block that is in a file."""
        return self._working[key] if key in self._working else self._committed.get(key)

    def write(self, key: str, version: int, block: torch.Tensor) -> None:
        """Write a block; the version of the last commit stays as it is until the next one."""
        content = memoryview(block.numpy())  # type: ignore[arg-type]
        before, committed = self.find(key), self._committed.get(key)
        slot = 0 if committed is None else 1 - committed.slot
        for place in self._in_order(before, len(content)):
            path = self._path(place, key, slot)
            try:
                self._put(path, content)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                self._unlink(path)
                continue
            self._working[key] = Stored(place, slot, len(content), version)
            self.written_bytes += len(content)
            return
        raise SpillFull(len(content), self.places)

    def read(self, key: str, block: torch.Tensor) -> int:
        """Read a block's newest version; returns that version."""
        stored = self.find(key)
        assert stored is not None, key
        assert stored.size == block.numel(), key
        content = memoryview(block.numpy())  # type: ignore[arg-type]
        descriptor = self._open(self._path(stored.place, key, stored.slot), make=False)
        done = 0
        while done < stored.size:
            count = os.preadv(descriptor, [content[done:]], done)
            if count == 0:
                raise OSError(errno.EIO, f"the spilled block {key} has {done} bytes instead of {stored.size}")
            done += count
        self.read_bytes += stored.size
        return stored.version

    def copy(self, key: str, to: str) -> None:
        """Make another block of the same bytes, file to file."""
        stored = self.find(key)
        assert stored is not None, key
        self.write(to, stored.version, self.mapped(key))

    def mapped(self, key: str) -> torch.Tensor:
        """A block's newest version as it lies in its file: only what is looked at is read. Changes stay private.

        For use before the second commit from now, which may write to the same file.
        """
        stored = self.find(key)
        assert stored is not None, key
        if not stored.size:
            return torch.empty(0, dtype=torch.uint8)
        path = self._path(stored.place, key, stored.slot)
        return torch.from_file(str(path), shared=False, size=stored.size, dtype=torch.uint8)

    def delete(self, key: str) -> None:
        """A block is no longer needed; its bytes go with the next commit where the last one names them."""
        # A file that no commit names stays for the next block of this key: every batch makes the same activations.
        if key in self._committed:
            self._working[key] = None
        else:
            self._working.pop(key, None)

    def commit(self, notes: Any) -> None:
        """From here on, what has been written so far is the trial's state."""
        merged: dict[str, Stored | None] = {**self._committed, **self._working}
        blocks = {key: stored for key, stored in merged.items() if stored is not None}
        self._make_directory(self.places[0])
        unfinished = self.places[0] / (_INDEX + ".tmp")
        index = json.dumps({"blocks": {k: asdict(s) for k, s in blocks.items()}, "notes": notes})
        try:
            unfinished.write_text(index)
            os.replace(unfinished, self.places[0] / _INDEX)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            if error.errno not in NO_ROOM:
                raise
            raise SpillFull(len(index), self.places[:1]) from error
        for key, stored in self._working.items():
            if stored is None:
                self._forget(key)
        self._committed, self.notes = blocks, notes
        self._working.clear()

    def _forget(self, key: str) -> None:
        """Delete the files of a block."""
        for place in range(len(self.places)):
            for slot in (0, 1):
                self._unlink(self._path(place, key, slot))

    def _unlink(self, path: Path) -> None:
        """Delete a file for good: one that is open would keep its room."""
        with self._opening:
            descriptor = self._descriptors.pop(str(path), None)
            if descriptor is not None:
                os.close(descriptor)
        path.unlink(missing_ok=True)

    @property
    def committed(self) -> Mapping[str, Stored]:
        """The blocks of the last commit, by key."""
        return self._committed

    def remove(self) -> None:
        """Delete everything: the trial has ended."""
        self.close()
        for place in self.places:
            remove_directory(place)

    def _in_order(self, before: Stored | None, size: int) -> Iterator[int]:
        """The places to try: where the block is already, then those with room."""
        if before is not None:
            yield before.place
        for place, directory in enumerate(self._places):
            tried = before is not None and place == before.place
            if not tried and _has_room(directory, size, last=place == len(self.places) - 1):
                yield place

    def _put(self, path: Path, content: memoryview) -> None:
        descriptor = self._open(path)
        done = 0
        while done < len(content):
            done += os.pwrite(descriptor, content[done:], done)

    def _open(self, path: Path, *, make: bool = True) -> int:
        """A descriptor of the file; the last ones used stay open."""
        with self._opening:
            name = str(path)
            descriptor = self._descriptors.pop(name, None)
            if descriptor is None:
                if make:
                    self._make_directory(path.parent)
                descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if make else 0), 0o600)
            self._descriptors[name] = descriptor
            if len(self._descriptors) > MOST_OPEN:
                # Two threads use one each: what was used longest ago is in nobody's hands.
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            return descriptor

    def _make_directory(self, directory: Path) -> None:
        """Raises FileNotFoundError where the trial has been removed: whoever writes late leaves nothing behind."""
        if self._committed and not self.places[0].is_dir():
            raise FileNotFoundError(errno.ENOENT, "the trial has ended", str(directory))
        directory.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        """Close the files; they stay."""
        with self._opening:
            _close_all(self._descriptors)

    def _path(self, place: int, key: str, slot: int) -> Path:
        return self.places[place] / f"{key.replace('/', '-')}.{slot}"


@dataclass(frozen=True)
class Lying:
    """Bytes in the files of a trial: on a tmpfs, which is host memory, and on disk."""

    host: int = 0
    disk: int = 0


def lying(places: Sequence[Path]) -> dict[int, Lying]:
    """What lies in the files of each trial, by its number, while others write there.

    A file that no block needs any more counts until it is gone: it takes its room.
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
    """Delete a directory in which others may still make files: under another name they no longer find it."""
    gone = directory.with_name(f"{directory.name}.gone")
    try:
        directory.rename(gone)
    except FileNotFoundError:
        return
    except OSError:  # such as one that is left over under that name
        gone = directory
    shutil.rmtree(gone, ignore_errors=True)


def _names_in(place: Path) -> list[str]:
    try:
        return os.listdir(place)
    except FileNotFoundError:
        return []


def _size_of(directory: Path) -> int:
    """Bytes of all files below a directory; what vanishes meanwhile counts for nothing."""
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
    """Write a file, or leave nothing of it where there is no room."""
    try:
        path.write_bytes(content)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno not in NO_ROOM:
            raise
        raise SpillFull(len(content), [path.parent]) from error


def _close_all(descriptors: dict[str, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


def _has_room(place: Path, size: int, *, last: bool) -> bool:
    """Whether a place may take so many bytes more: each has a budget, and on a tmpfs the machine's memory has one.

    The last place is filled further: there is nowhere else to go.
    """
    facts = os.statvfs(place)
    if not facts.f_blocks:
        return last  # a file system that does not say: it is tried where there is no other
    keep = facts.f_blocks * facts.f_frsize * KEPT_FREE
    if facts.f_bavail * facts.f_frsize - size < (min(keep, LAST_KEPT_FREE) if last else keep):
        return False
    if last or not in_memory(place):
        return True
    available, whole = memory()
    return available - size >= whole * MEMORY_KEPT


@functools.cache
def in_memory(place: Path) -> bool:
    """Whether files there are host memory."""
    try:
        mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return False
    holding = [(len(at), kind) for at, kind in mounts if place.resolve().is_relative_to(at)]
    return bool(holding) and max(holding)[1] in ("tmpfs", "ramfs")


def memory() -> tuple[int, int]:
    """The machine's memory that is available, and all of it; in bytes."""
    facts = psutil.virtual_memory()
    return facts.available, facts.total
