"""Measurements cached on disk as JSON documents, so that later trials and runs need not measure again.

A missing, damaged or outdated document is measured again; a full or read-only disk costs a measurement, not a trial.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def kept(path: Path) -> dict[str, Any] | None:
    """Return the JSON document at `path`; None if it is missing or unreadable."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def keep(path: Path, document: dict[str, Any]) -> None:
    """Write a JSON document atomically: `path` is always complete, even if several processes write it."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(document))
        os.replace(unfinished, path)
        for left in path.parent.glob(f"{path.stem}.*.tmp"):
            left.unlink(missing_ok=True)  # of a process that was killed just before it renamed its own
    except OSError as error:
        logger.info("a measurement could not be written to %s (%s)", path, error)
        with contextlib.suppress(OSError):
            unfinished.unlink()
