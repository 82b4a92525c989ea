"""Directories of one search for data that processes exchange, in shared memory and on disk.

A search owns a directory by a lock that it holds (flock), not by a process id: ids mean nothing to a container with a
process namespace of its own that shares the place. The kernel frees the lock when the coordinator dies, however it
dies, and the next search removes a directory whose lock is free. Cleaners of temporary files that respect locks
(systemd-tmpfiles) leave a locked directory alone; after any other has removed it, `RunDirectories.restore` makes it
again.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hydra_tune.core.errors import InputError

SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_MEMORY = 512 * 2**20
_RUN = re.compile(r"hydra-tune-search-.*")  # versions before the lock called theirs hydra-tune-run-
_NEW = "hydra-tune-new-"
"""Prefix of a directory whose lock is not taken yet; it is empty."""


class RunDirectories:
    """The directories of one search, each locked: the first for exchanged data, the others for what does not fit."""

    def __init__(self, places: list[str]) -> None:
        self._locks: dict[str, int] = {}
        """Descriptor of each directory, which holds its lock."""
        self.losses = 0
        """Times that a directory was found to be gone."""
        try:
            for place in places:
                for abandoned in abandoned_directories(Path(place)):
                    shutil.rmtree(abandoned, ignore_errors=True)
                made = _new_directory(place)
                path = os.path.join(place, f"hydra-tune-search-{os.getpid()}-{os.path.basename(made)[len(_NEW) :]}")
                self._locks[path] = _published(made, path)
        except BaseException:
            self.remove()
            raise

    @property
    def paths(self) -> tuple[str, ...]:
        """The directories, the first in host memory if there is room."""
        return tuple(self._locks)

    def restore(self, needed: str) -> bool:
        """Make directories again that were removed; return True if there were any. What was in them is lost.

        Also True if the file `needed` is missing from the first directory.
        """
        missing = [path for path, lock in self._locks.items() if not _is_open_as(path, lock)]
        for path in missing:
            lock = _published(_new_directory(os.path.dirname(path)), path)
            os.close(self._locks[path])
            self._locks[path] = lock
        lost = bool(missing) or not os.path.exists(os.path.join(self.paths[0], needed))
        self.losses += lost
        return lost

    def remove(self) -> None:
        """Delete the directories."""
        for path, lock in self._locks.items():
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
        self._locks.clear()


@contextmanager
def run_directories(spill: str | None) -> Iterator[RunDirectories]:
    """Create directories for one search, the first in shared memory if there is room, the last on disk.

    A directory that the user names is the only one. Directories of killed searches are removed first.
    """
    _check_current_folder()
    directories = RunDirectories([str(spill)] if spill else _default_places())
    try:
        yield directories
    finally:
        directories.remove()


def remove_abandoned() -> None:
    """Remove the directories of searches of this user that were killed."""
    for place in _default_places():
        for abandoned in abandoned_directories(Path(place)):
            shutil.rmtree(abandoned, ignore_errors=True)


def _default_places() -> list[str]:
    return [*([str(SHARED_MEMORY)] if _is_roomy() else []), tempfile.gettempdir()]


def abandoned_directories(place: Path) -> list[Path]:
    """Return this user's directories of searches that have ended: those whose lock is free."""
    found = []
    for entry in place.iterdir() if place.is_dir() else ():
        if not (_RUN.fullmatch(entry.name) or entry.name.startswith(_NEW)):
            continue
        with suppress(OSError):  # gone by now, or on a file system without locks: left alone
            descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    found.append(entry)
            finally:
                os.close(descriptor)
    return found


def _new_directory(place: str) -> str:
    try:
        return tempfile.mkdtemp(prefix=_NEW, dir=place)
    except OSError as error:
        raise InputError(
            f"no directory can be made in {place!r} ({error.strerror})", "give another directory as spill (--spill)"
        ) from error


def _published(made: str, path: str) -> int:
    """Lock the new directory, then give it its name; return the descriptor that holds the lock.

    In this order, another search never sees it without a lock under that name. One that sees it before, and removes
    it, makes the renaming fail, and another is made.
    """
    while True:
        try:
            descriptor = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
            try:
                with suppress(OSError):  # a file system without locks, where no search removes another's directory
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                os.rename(made, path)
            except BaseException:
                os.close(descriptor)
                raise
            return descriptor
        except FileNotFoundError:
            made = _new_directory(os.path.dirname(path))


def _is_open_as(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _check_current_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise InputError("the current folder has been removed", "change to one that is there") from error


def _is_roomy() -> bool:
    usable = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
    return usable and shutil.disk_usage(SHARED_MEMORY).free >= LEAST_SHARED_MEMORY
