"""Data by name: a bundled set, a table in a file, or a function of the user's.

    "digits"                                 a bundled data set; `{"name": "text", "block": 128}` with options
    "house.csv", "house.parquet"             a table, whose last column is the target
    {"csv": "house.csv", "target": "price"}  a table with a named target; `"task"` where the guess is wrong
    "file.py:function"                       a function that returns (train, valid) datasets or a `Data`

Each is loaded once per process, so that all candidates share the same tensors.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra_tune.core.errors import SpecError, nearest, quoted
from hydra_tune.search_spaces.bundled import BUNDLED
from hydra_tune.search_spaces.dataset import Data
from hydra_tune.search_spaces.python_file import call_file_function
from hydra_tune.search_spaces.tables import FORMATS, load_table

__all__ = ["BUNDLED", "Data", "load"]

TABLE_KEYS = ("target", "task")


def load(spec: str | Mapping[str, Any] | Data) -> Data:
    """Return the data for a name, a path or a mapping; the same object each time in one process."""
    if isinstance(spec, Data):
        return spec
    source, options = _parsed(spec)
    return _load(source, json.dumps(options, sort_keys=True), _stamp(source))


def _parsed(spec: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Split a specification into a source (a bundled name, a path or `file.py:function`) and options."""
    if isinstance(spec, str):
        return spec, {}
    if not isinstance(spec, Mapping):
        raise SpecError(f"data cannot be {quoted(spec)}", "give a name, a path, file.py:function, or a mapping")
    options = dict(spec)
    sources = [key for key in ("name", *FORMATS) if key in options]
    if len(sources) != 1:
        raise SpecError(f"data {quoted(dict(spec))} must have one of the keys name, {', '.join(FORMATS)}")
    source = options.pop(sources[0])
    if not isinstance(source, str | os.PathLike):
        raise SpecError(f"data has the {sources[0]} {quoted(source)}", "give a text")
    if sources[0] != "name":
        options["format"] = sources[0]
    return os.fspath(source), options


def _stamp(source: str) -> tuple[int, int] | None:
    """Return the file's modification time (ns) and size, so that a changed file is read again; None if unreadable."""
    path = Path(source.rpartition(":")[0] if ":" in source else source)
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


@functools.cache
def _load(source: str, options_text: str, stamp: tuple[int, int] | None) -> Data:
    options: dict[str, Any] = json.loads(options_text)
    table_format = options.pop("format", None) or Path(source).suffix.lstrip(".").lower()
    if source in BUNDLED:
        return _bundled(source, options)
    if table_format in FORMATS:
        _check_options(source, options, TABLE_KEYS)
        return load_table(Path(source), table_format, **options)
    if ".py:" in source:
        _check_options(source, options, ())
        return call_file_function(source)
    hint = nearest(source, BUNDLED) + "; or a .csv or .parquet path, or file.py:function"
    raise SpecError(f"there is no data {quoted(source)}", hint)


def _bundled(name: str, options: dict[str, Any]) -> Data:
    function = BUNDLED[name]
    _check_options(name, options, tuple(inspect.signature(function).parameters))
    return function(**options)


def _check_options(source: str, options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in options:
        if key not in known:
            hint = nearest(key, known) if known else "it takes none"
            raise SpecError(f"data {quoted(source)} has no option {key!r}", hint)
