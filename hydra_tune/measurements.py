"""Measurements on disk: JSON documents that spare later trials and runs a measurement, and are never needed.

What is not there, not whole or of another form is measured again; a full or read-only disk costs a measurement, not a
trial.
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
    """The document that was kept there, where it can be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def keep(path: Path, document: dict[str, Any]) -> None:
    """Keep a document, so that `path` is always whole, whoever else keeps the same."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(document))
        os.replace(unfinished, path)
    except OSError as error:
        logger.info("a measurement is not kept in %s (%s)", path, error)
        with contextlib.suppress(OSError):
            unfinished.unlink()
