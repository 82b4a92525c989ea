"""The seeded killer of `benchmarks.crash`, with a few kills."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_random_kills_lose_nothing() -> None:
    command = [sys.executable, "-m", "benchmarks.crash", "--kills", "4", "--seed", "3"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] == 4
    for name in ("lost_results", "duplicated_results", "integrity_failures", "left_over_checkpoints"):
        assert found[name] == 0, name
    assert found["metrics_equal_to_unbroken_run"] is True
