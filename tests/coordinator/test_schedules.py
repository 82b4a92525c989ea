"""Simulated searches on a virtual clock: a few hundred schedules of faults, and a mistake that they find."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

MISTAKE = """
from hydra_tune.coordinator.attempt import Attempt

async def forget(self, history, notes):
    pass

Attempt.restored = forget
"""


def simulate(count: int, before: str = "") -> dict[str, Any]:
    """Simulate schedules in a process of their own, as they replace its clock."""
    code = f"{before}\nimport sys\nfrom benchmarks.schedules import main\nsys.argv[1:] = ['--count', '{count}']\nmain()"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_no_schedule_of_faults_costs_more_than_it_must() -> None:
    found = simulate(60)
    assert found["failing_seeds"] == []
    assert found["schedules"] == 60
    assert found["faults"] > 50


def test_a_coordinator_that_forgets_what_a_checkpoint_holds_is_found() -> None:
    assert simulate(40, MISTAKE)["failing"] > 0
