"""A seeded sample of crash points and of errors at them, on every strategy's common path.

`HYDRA_TUNE_CRASH_POINTS=60` takes as many points; docs/reliability.md has the result of all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

POINTS = os.environ.get("HYDRA_TUNE_CRASH_POINTS", "3")


@pytest.mark.parametrize("flags", [("whole",), ("shard",), ("whole", "--errors")], ids="-".join)
def test_a_search_that_is_disturbed_ends_as_if_it_had_not_been(flags: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "benchmarks.crash_points", "--sample", POINTS, "--seed", "5", "--strategy", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["points"] == int(POINTS)
    assert found["not_reached"] < int(POINTS)
    assert (found["lost"], found["different"], found["left_over"]) == (0, 0, 0), done.stdout
