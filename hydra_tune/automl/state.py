"""The directory of a fit, the state needed to resume it, and parsing of times."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra_tune.automl.predictor import PREDICTOR
from hydra_tune.automl.prepared import DESCRIPTION
from hydra_tune.automl.reading import TableLike
from hydra_tune.core.errors import InputError, SpecError, quoted

STATE = "fit.json"
LEAST_SECONDS = 5.0
_UNITS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class FitState:
    """The options of a fit, and the seconds of its time already spent."""

    study: str
    metric: str
    seed: int
    plan: dict[str, Any]
    seconds: float | None
    trials: int | None
    refit: bool
    spent: float = 0.0
    notes: tuple[str, ...] = ()

    def save(self, directory: Path) -> None:
        unfinished = directory / f"{STATE}.tmp"
        unfinished.write_text(json.dumps(vars(self), indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, directory / STATE)

    @classmethod
    def load(cls, directory: Path) -> FitState:
        try:
            plain = json.loads((directory / STATE).read_text(encoding="utf-8"))
            return cls(**{**plain, "notes": tuple(plain["notes"])})
        except (FileNotFoundError, NotADirectoryError):
            hint = "leave out --resume to start one"
            raise InputError(f"{str(directory)!r} holds no fit to go on with", hint) from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(f"{directory / STATE} is damaged ({quoted(error)})", "fit again") from error


def parse_seconds(time: str | float) -> float:
    """Parse a time such as 90, "90s", "10m" or "1h30m" into seconds."""
    seconds = math.nan
    if isinstance(time, int | float) and not isinstance(time, bool):
        seconds = float(time)
    elif isinstance(time, str):
        text = re.sub(r"\s", "", time.lower())
        parts = re.findall(r"(\d+(?:\.\d+)?)([a-z]*)", text)
        spelled = "".join(number + unit for number, unit in parts) == text
        if parts and spelled and all((unit or "s") in _UNITS for _, unit in parts):
            seconds = sum(float(number) * _UNITS[unit or "s"] for number, unit in parts)
    if not math.isfinite(seconds) or seconds < LEAST_SECONDS:
        raise SpecError(f"time cannot be {quoted(time)}", f"give at least {LEAST_SECONDS:.0f}s, such as 90s, 10m or 1h")
    return seconds


def free_directory(table: TableLike) -> Path:
    """Return a directory in the current one that does not exist yet, named after the table."""
    stem = Path(table).stem if isinstance(table, str | Path) else "table"
    name = re.sub(r"[^\w.-]", "_", stem) or "table"
    numbered = (Path(f"{name}-model{'' if i == 1 else f'-{i}'}") for i in range(1, 10**6))
    return next(path for path in numbered if not path.exists())


def check_free(directory: Path) -> None:
    """Raise SpecError if a directory holds a fit."""
    if directory.exists() and not directory.is_dir():
        raise SpecError(f"{str(directory)!r} is a file", "give a directory with --to")
    for name in (STATE, DESCRIPTION, PREDICTOR):
        if (directory / name).exists():
            raise SpecError(
                f"{str(directory)!r} holds a fit already", "give --resume to go on with it, or another --to"
            )


def make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{directory} cannot be made ({error.strerror})", "give another --to") from error
