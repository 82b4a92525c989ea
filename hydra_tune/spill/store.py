"""Files of the spill store: blocks of bytes by key, each in two slots, committed together.

A trial's blocks (parameters, optimizer state, buffers, activations) live in files of the run's directories: in host
memory (a tmpfs) while there is room, then on disk. A block is written to the slot that the last commit does not use,
and `commit` switches all new slots at once by renaming one small index file. If a process is killed during a write or
between two commits, the state of the last commit is intact for the next process that opens the files.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra_tune.spill.places import NO_ROOM, SpillFull, has_room, remove_directory

if TYPE_CHECKING:
    import torch

_INDEX = "index.json"
MOST_OPEN = 64
"""Most files of one trial that stay open."""


@dataclass(frozen=True)
class Stored:
    """Location of a block's bytes."""

    place: int
    slot: int
    size: int
    version: int


class SpillFiles:
    """The files of one trial, in a directory of that name in each place; the first place with room takes a new block.

    One process at a time writes; another may take over after a commit, with `reload`.
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
        """Changes since the last commit, by key; None for a deleted block."""
        self.notes: Any = None
        """Extra data of the last commit."""
        self.reload()

    def reload(self) -> None:
        """Load the state of the last commit, by any process."""
        self._working.clear()
        try:
            index = json.loads((self.places[0] / _INDEX).read_bytes())
        except FileNotFoundError:
            self._committed, self.notes = {}, None
            return
        self._committed = {key: Stored(**stored) for key, stored in index["blocks"].items()}
        self.notes = index["notes"]

    def find(self, key: str) -> Stored | None:
        """Return the location of a block's newest version; None if it is in no file."""
        return self._working[key] if key in self._working else self._committed.get(key)

    def write(self, key: str, version: int, block: torch.Tensor) -> None:
        """Write a block; the committed version stays unchanged until the next commit."""
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
        """Read a block's newest version and return the version number."""
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
        """Copy a block to another key, file to file."""
        stored = self.find(key)
        assert stored is not None, key
        self.write(to, stored.version, self.mapped(key))

    def mapped(self, key: str) -> torch.Tensor:
        """Return a block's newest version mapped from its file: only accessed pages are read. Changes stay private.

        Valid until the second commit from now, which may write to the same file.
        """
        import torch

        stored = self.find(key)
        assert stored is not None, key
        if not stored.size:
            return torch.empty(0, dtype=torch.uint8)
        path = self._path(stored.place, key, stored.slot)
        return torch.from_file(str(path), shared=False, size=stored.size, dtype=torch.uint8)

    def delete(self, key: str) -> None:
        """Delete a block; if the last commit uses it, its bytes are freed at the next commit."""
        # An uncommitted file stays for the next block of this key: every batch makes the same activations.
        if key in self._committed:
            self._working[key] = None
        else:
            self._working.pop(key, None)

    def commit(self, notes: Any) -> None:
        """Make all writes so far the trial's committed state, with `notes`."""
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
        """Close and delete a file: an open one would keep its space."""
        with self._opening:
            descriptor = self._descriptors.pop(str(path), None)
            if descriptor is not None:
                os.close(descriptor)
        path.unlink(missing_ok=True)

    @property
    def committed(self) -> Mapping[str, Stored]:
        """Blocks of the last commit, by key."""
        return self._committed

    def remove(self) -> None:
        """Delete all files of the trial, which has ended."""
        self.close()
        for place in self.places:
            remove_directory(place)

    def _in_order(self, before: Stored | None, size: int) -> Iterator[int]:
        """Yield the places to try: the block's current place, then those with room."""
        if before is not None:
            yield before.place
        for place, directory in enumerate(self._places):
            tried = before is not None and place == before.place
            if not tried and has_room(directory, size, last=place == len(self.places) - 1):
                yield place

    def _put(self, path: Path, content: memoryview) -> None:
        descriptor = self._open(path)
        done = 0
        while done < len(content):
            done += os.pwrite(descriptor, content[done:], done)

    def _open(self, path: Path, *, make: bool = True) -> int:
        """Return a descriptor of the file; the most recently used stay open."""
        with self._opening:
            name = str(path)
            descriptor = self._descriptors.pop(name, None)
            if descriptor is None:
                if make:
                    self._make_directory(path.parent)
                descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if make else 0), 0o600)
            self._descriptors[name] = descriptor
            if len(self._descriptors) > MOST_OPEN:
                # Two threads use one descriptor each, so the least recently used one is not in use.
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            return descriptor

    def _make_directory(self, directory: Path) -> None:
        """Create the directory; raise FileNotFoundError if the trial was removed, so that late writes leave nothing."""
        if self._committed and not self.places[0].is_dir():
            raise FileNotFoundError(
                errno.ENOENT, "the spill directory is gone, because its trial has ended", str(directory)
            )
        directory.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        """Close the files without deleting them."""
        with self._opening:
            _close_all(self._descriptors)

    def _path(self, place: int, key: str, slot: int) -> Path:
        return self.places[place] / f"{key.replace('/', '-')}.{slot}"


def _close_all(descriptors: dict[str, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])
