"""Sends an attempt's files over a line, in pieces between other messages, and puts them in place at the other end.

Received files replace earlier ones only when all have arrived, and keep their sizes; names cannot lead out of their
directory. A checkpoint's JSON is put in place last: without it the tensors are ignored.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Protocol

from hydra_tune.cluster.framing import Refused
from hydra_tune.cluster.messages import Piece, Whole

PIECE_BYTES = 1 << 20
"""Bytes of a piece: beats and records wait for at most one or two."""
WEIGHTS, CHECKPOINTS = "weights", "checkpoints"
_UNFINISHED = ".tmp"
_ARRIVING = ".arriving"


class Outgoing(Protocol):
    """The part of a line that sends."""

    def send(self, message: object) -> None: ...

    async def drained(self) -> None:
        """Wait until most of what was sent has left this process."""


@dataclass
class Sent:
    """Files of a directory that the other end already has: sizes and times, by name."""

    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    bytes: int = 0
    """Bytes sent so far."""

    @classmethod
    def of(cls, directory: Path) -> Sent:
        """Return the present files of a directory that came from the other end."""
        paths = [path for path in directory.rglob("*") if path.is_file()] if directory.is_dir() else []
        stats = {path.relative_to(directory).as_posix(): path.stat() for path in paths}
        return cls({name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()})


def for_trial(number: int) -> str:
    """Return the name under which a trial's checkpoints travel to the node of its next attempt."""
    return f"trial {number}"


def trial_of(attempt: str) -> int | None:
    """Return the trial whose checkpoints travel under this name; None if it is an attempt's."""
    number = attempt.removeprefix("trial ")
    return int(number) if number != attempt and number.isdecimal() else None


async def send_directory(line: Outgoing, attempt: str, directory: Path, sent: Sent) -> None:
    """Send the files of a directory that the other end does not have, and the names of all."""
    with ExitStack() as opened:
        # Open all before reading any: a file that is removed meanwhile can still be read.
        files = {name: opened.enter_context(file) for name, file in _opened(directory)}
        stats = {name: os.fstat(file.fileno()) for name, file in files.items()}
        states = {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}
        for name, file in files.items():
            if sent.files.get(name) != states[name]:
                sent.bytes += await _send_file(line, attempt, CHECKPOINTS, name, file, states[name][0])
        sent.files = states
        line.send(Whole(attempt, CHECKPOINTS, tuple(states), tuple(size for size, _ in states.values())))
    await line.drained()


async def send_weights(line: Outgoing, attempt: str, path: Path) -> int:
    """Send a trial's weights, if there are any; return the bytes."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below
    except FileNotFoundError:
        return 0
    with file:
        size = os.fstat(file.fileno()).st_size
        await _send_file(line, attempt, WEIGHTS, path.name, file, size)
        line.send(Whole(attempt, WEIGHTS, (path.name,), (size,)))
    await line.drained()
    return size


async def _send_file(line: Outgoing, attempt: str, kind: str, name: str, file: IO[bytes], size: int) -> int:
    offset = 0
    while offset < size or not offset:
        data = file.read(min(PIECE_BYTES, size - offset))
        line.send(Piece(attempt, kind, name, offset, data))
        await line.drained()
        offset += len(data)
        if not data:
            break
    return offset


def _opened(directory: Path) -> Iterator[tuple[str, IO[bytes]]]:
    for path in sorted(directory.rglob("*")) if directory.is_dir() else ():
        if path.is_file() and not path.is_symlink() and not path.name.endswith((_UNFINISHED, _ARRIVING)):
            try:
                yield path.relative_to(directory).as_posix(), open(path, "rb")  # noqa: SIM115 - the caller closes it
            except FileNotFoundError:
                continue


@dataclass
class Arriving:
    """Files of attempts that are arriving at this end."""

    place: Callable[[str, str], Path | None]
    """Returns the file of an attempt's weights or the directory of its checkpoints; None if the attempt is over."""
    received: int = 0
    """Bytes received so far."""

    def take(self, message: Piece | Whole) -> None:
        """Take in a message about files; raises OSError if they cannot be written."""
        if isinstance(message, Piece):
            self.piece(message)
        else:
            self.whole(message)

    def piece(self, piece: Piece) -> None:
        """Write a piece beside the file that it will replace; raises OSError if that cannot be written."""
        path = self._path(piece.attempt, piece.kind, piece.name)
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + _ARRIVING)
        with open(unfinished, "r+b" if piece.offset else "wb") as file:
            file.seek(piece.offset)
            file.write(piece.data)
        self.received += len(piece.data)

    def whole(self, whole: Whole) -> None:
        """Put all files that have arrived in place, and remove others of the attempt's checkpoints."""
        paths = {name: self._path(whole.attempt, whole.kind, name) for name in whole.names}
        for name, size in sorted(
            zip(whole.names, whole.sizes, strict=True), key=lambda each: each[0].endswith(".json")
        ):
            path = paths[name]
            if path is None:
                return
            unfinished = path.with_name(path.name + _ARRIVING)
            if unfinished.exists():
                if unfinished.stat().st_size != size:
                    raise Refused(f"{name} has {unfinished.stat().st_size} bytes and should have {size}")
                _sync(unfinished)
                os.replace(unfinished, path)
        if whole.kind == CHECKPOINTS:
            self._remove_others(whole)

    def _remove_others(self, whole: Whole) -> None:
        directory = self.place(whole.attempt, CHECKPOINTS)
        if directory is None or not directory.is_dir():
            return
        for path in sorted(directory.rglob("*"), key=lambda each: not each.name.endswith(".json")):
            if path.is_file() and path.relative_to(directory).as_posix() not in whole.names:
                path.unlink(missing_ok=True)

    def _path(self, attempt: str, kind: str, name: str) -> Path | None:
        place = self.place(attempt, kind)
        if place is None or kind == WEIGHTS:
            return place
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts or not relative.parts:
            raise Refused(f"a file is called {name!r}, which leads out of its directory")
        return place / relative


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
