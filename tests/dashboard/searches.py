"""Searches as real processes, which the tests observe and send actions to while they run."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
STUDIES = Path(__file__).with_name("studies.py")


@contextmanager
def searching(folder: Path, what: str, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """`hydra-tune search studies.py:WHAT` in `live.db` of the folder."""
    spec = f"{STUDIES}:{what}"
    command = [sys.executable, "-m", "hydra_tune", "search", spec, "--study", "live", "--storage", "sqlite:///live.db"]
    log = (folder / "search.log").open("w")
    search = subprocess.Popen([*command, "--devices", "2xcpu", *flags], cwd=folder, stderr=log, stdout=log, text=True)
    try:
        yield search
    finally:
        if search.poll() is None:
            search.terminate()
        search.wait()
        log.close()


def until(found: Callable[[], T | None]) -> T:
    """The first thing that is found."""
    while True:
        thing = found()
        if thing:
            return thing
        time.sleep(0.05)
