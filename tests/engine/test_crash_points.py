"""Crash points: nothing is numbered by default, and a process dies exactly at the named point."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from hydra_tune.engine.crash_points import VARIABLE

WORK = """
import os, sys
from pathlib import Path
from hydra_tune.engine import crash_points
before = os.replace
crash_points.install("coordinator")
if "--off" in sys.argv:
    assert os.replace is before
Path("a").write_text("1")
for number in range(5):
    Path(f"b{number}").write_text("2")
    os.replace(f"b{number}", f"c{number}")
"""


def work(folder: Path, point: str | None, *flags: str) -> int:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if point is not None:
        environment[VARIABLE] = f"{folder}:{point}"
    return subprocess.run([sys.executable, "-c", WORK, *flags], cwd=folder, env=environment).returncode


def test_points_are_counted_and_kill_once(tmp_path: Path) -> None:
    assert work(tmp_path, "") == 0
    (count,) = tmp_path.glob("coordinator-*.count")
    assert count.read_text() == "11", "each file is opened to write, and all but one are renamed"
    for number in range(5):
        (tmp_path / f"c{number}").unlink()
    assert work(tmp_path, "coordinator:7") == -signal.SIGKILL
    assert sorted(file.name for file in tmp_path.glob("[bc]?")) == ["b2", "c0", "c1"], "before the third renaming"
    assert work(tmp_path, "coordinator:7") == 0, "once"
    assert work(tmp_path, "cpu0:7") == 0, "another process is not meant"


def test_an_error_is_raised_at_a_point(tmp_path: Path) -> None:
    """Error 0 of a renaming is a full disk."""
    assert work(tmp_path, "coordinator:7:0") == 1
    assert sorted(file.name for file in tmp_path.glob("[bc]?")) == ["b2", "c0", "c1"]
    assert (tmp_path / "happened").read_text() == "replace: [Errno 28] injected: no space left on device"


def test_without_the_variable_nothing_is_installed(tmp_path: Path) -> None:
    assert work(tmp_path, None, "--off") == 0
