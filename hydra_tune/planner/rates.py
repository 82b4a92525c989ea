"""Rates at which this machine computes and moves bytes, kept in the user's cache directory.

`calibration.py` measures them, and `hydra-tune doctor --calibrate` measures again. The pace of a search's own trials
then corrects plans made with these rates.
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from hydra_tune.core.measurements import keep, kept
from hydra_tune.strategies.pool import Rates

FORMAT = 2


def cache_file() -> Path:
    """Return the file with the rates of this machine."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "hydra_tune" / f"rates-{platform.node() or 'machine'}.json"


def known_rates() -> Rates | None:
    """Return the stored rates; None if they are missing, unreadable or outdated."""
    stored = kept(cache_file())
    if stored is None or stored.pop("format", None) != FORMAT or stored.pop("torch", None) != _torch_version():
        return None
    try:
        found = Rates(**{name: float(value) for name, value in stored.items()})
    except (ValueError, TypeError):
        return None  # another format: measure again
    return found if all(value > 0 for value in asdict(found).values()) else None


def keep_rates(rates: Rates) -> None:
    """Store the rates for later searches; a machine without a writable cache measures each time."""
    keep(cache_file(), {"format": FORMAT, "torch": _torch_version(), **asdict(rates)})


def _torch_version() -> str:
    """Return the installed version of torch, without importing it: rates of another version do not count."""
    return metadata.version("torch")
