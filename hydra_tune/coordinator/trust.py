"""Decides which code a study's record may make `resume` and `export` execute.

Others may be able to write to the database that holds the record and the recorded source text. So code that the record
names is executed only if it lies under the current folder, or if the user names it with `--trust`.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra_tune.core.errors import SpecError, quoted


def check_trusted(record: Mapping[str, Any], study: str, trusted: Sequence[str] = ()) -> None:
    """Raise a SpecError if a study's source would execute code that is neither here nor in `trusted`.

    `trusted` has files, folders and names of modules.
    """
    for named in _executed(record):
        if not _is_here(named) and not any(_covers(each, named) for each in trusted):
            raise SpecError(
                f"study {study!r} names code that is not under the current folder: {quoted(named, 200)}",
                f"if you trust it: --trust {shlex.quote(named)}",
            )


def trust_flags(record: Mapping[str, Any] | None) -> str:
    """Return the flags, if any, without which `resume` here would refuse the code of this source."""
    outside = [named for named in _executed(record or {}) if not _is_here(named)]
    return "".join(f" --trust {shlex.quote(named)}" for named in outside)


def _executed(record: Mapping[str, Any]) -> list[str]:
    """Return the files and modules that a source executes."""
    match record:
        case {"kind": "file", "path": str(path)}:
            return [path]
        case {"kind": "module", "module": str(module)}:
            return [module]
        case {"kind": "family", "data": data}:
            texts = data.values() if isinstance(data, Mapping) else [data]
            return [text.rpartition(":")[0] for text in texts if isinstance(text, str) and ".py:" in text]
    return []


def _is_module(named: str) -> bool:
    return not named.endswith(".py")


def _is_here(named: str) -> bool:
    here = Path.cwd().resolve()
    if not _is_module(named):
        return Path(named).resolve().is_relative_to(here)
    place = here.joinpath(*named.split("."))
    found = [file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
    return bool(found) and found[0].resolve().is_relative_to(here)


def _covers(trusted: str, named: str) -> bool:
    if _is_module(named):
        return named == trusted or named.startswith(f"{trusted}.")
    return Path(named).resolve().is_relative_to(Path(trusted).resolve())
