"""Reads tables: a CSV or Parquet file, a pandas frame, or images in an `.npz` file.

A guessed encoding or separator is reported in notes.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from hydra_tune.core.errors import SpecError, nearest, quoted
from hydra_tune.search_spaces.tables import FORMATS, read_frame

if TYPE_CHECKING:
    import pandas as pd

TableLike: TypeAlias = Any
"""A path, a pandas frame, or a mapping of names to arrays."""

CHUNK = 1 << 20


@dataclass(frozen=True)
class Table:
    """Rows with named columns, or named arrays; either `frame` or `arrays` is set."""

    name: str
    frame: pd.DataFrame | None = None
    arrays: dict[str, np.ndarray] | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def columns(self) -> list[str]:
        if self.arrays is not None:
            return list(self.arrays)
        assert self.frame is not None
        return list(self.frame.columns)


def read_table(source: TableLike) -> Table:
    """Read a table from a path or a frame."""
    import pandas as pd

    if isinstance(source, Table):
        return source
    if isinstance(source, pd.DataFrame):
        return _checked(Table("the frame", source.rename(columns=str).reset_index(drop=True)))
    if not isinstance(source, str | Path):
        raise SpecError(f"a table cannot be {quoted(source)}", "give a .csv, .parquet or .npz path, or a pandas frame")
    path = Path(source)
    if not path.is_file():
        raise SpecError(f"there is no file {quoted(str(path))}", "give the path of a .csv, .parquet or .npz file")
    suffix = path.suffix.lstrip(".").lower()
    if suffix == "npz":
        return _read_arrays(path)
    if suffix not in FORMATS:
        raise SpecError(f"{quoted(str(path))} is no table", "give a .csv, .parquet or .npz file")
    if suffix == "parquet":
        return _checked(Table(str(path), read_frame(path, suffix)))
    encoding, notes = _encoding(path)
    separator, more = _separator(path, encoding)
    frame = read_frame(path, suffix, encoding=encoding, sep=separator)
    return _checked(Table(str(path), frame, notes=notes + more))


def find_target(table: Table, target: str) -> None:
    """Raise SpecError if a table lacks its target, or has no other column."""
    if target not in table.columns:
        raise SpecError(f"{table.name} has no column {quoted(target)}", nearest(str(target), table.columns))
    if len(table.columns) < 2:
        raise SpecError(f"{table.name} has no column besides the target {target!r}", "add columns to predict from")


def _checked(table: Table) -> Table:
    frame = table.frame
    assert frame is not None
    twice = frame.columns[frame.columns.duplicated()]
    if len(twice):
        raise SpecError(f"{table.name} has two columns {quoted(twice[0])}", "give each column its own name")
    if not len(frame):
        raise SpecError(f"{table.name} has no rows", "give a header line and rows")
    return table


def _encoding(path: Path) -> tuple[str, list[str]]:
    """Return UTF-8 or UTF-16 if the bytes are valid, otherwise Windows' western code page."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0
    with path.open("rb") as file:
        head = file.read(4)
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return "utf-16", []
        file.seek(0)
        while chunk := file.read(CHUNK):
            if b"\0" in chunk:
                raise SpecError(f"{path} holds bytes of no text", "give a text file of comma-separated values")
            try:
                decoder.decode(chunk)
            except UnicodeDecodeError as error:
                at = position + error.start
                return "cp1252", [f"{path} is not UTF-8 (byte {at}): read as Windows-1252"] if _is_western(path) else []
            position += len(chunk)
    return "utf-8-sig" if head.startswith(codecs.BOM_UTF8) else "utf-8", []


def _is_western(path: Path) -> bool:
    try:
        path.read_bytes().decode("cp1252")
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{path} is neither UTF-8 nor Windows-1252 (byte {error.start} is {error.object[error.start]:#04x})",
            "save it as UTF-8",
        ) from None
    return True


def _separator(path: Path, encoding: str) -> tuple[str, list[str]]:
    """Return a comma, unless the header has none but has semicolons or tabs."""
    with path.open(encoding=encoding) as file:
        header = file.readline()
    if "," not in header:
        for separator, called in ((";", "semicolons"), ("\t", "tabs")):
            if separator in header:
                return separator, [f"{path} is separated by {called}"]
    return ",", []


def _read_arrays(path: Path) -> Table:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # noqa: BLE001 - an absurd header makes numpy raise anything, MemoryError too
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SpecError(f"{path} cannot be read as .npz: {reason}", "save arrays of numbers with numpy.savez") from None
    if not arrays:
        raise SpecError(f"{path} has no arrays", "save images and targets with numpy.savez")
    return Table(str(path), arrays=arrays)
