"""The reaper kills the groups that are registered when the coordinator ends, and no others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest

from hydra_tune.engine.reaper import Reaper

pytestmark = pytest.mark.smoke

COORDINATOR = """
import os, select, subprocess, sys
from hydra_tune.engine.reaper import Reaper

reaper = Reaper()
group = subprocess.Popen(["sleep", "1000"], start_new_session=True)
reaper.watch(group.pid)
# A fork holds the pipe open after the coordinator's end, until the group is gone.
if os.fork() == 0:
    os.close(1)
    select.select([os.pidfd_open(group.pid)], [], [], 30)
    os._exit(0)
print(group.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def groups() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that each lead a group."""
    with ExitStack() as ended:
        started = [subprocess.Popen(["sleep", "1000"], start_new_session=True) for _ in range(2)]
        for process in started:
            ended.enter_context(process)
            ended.callback(process.kill)
        yield started


def test_a_group_that_was_taken_back_is_spared(groups: list[subprocess.Popen[bytes]]) -> None:
    ours, foreign = groups
    reaper = Reaper()
    for process in groups:
        reaper.watch(process.pid)
    reaper.forget(foreign.pid)
    reaper.close()
    assert ours.wait() == -9
    assert foreign.poll() is None


def test_the_end_of_the_process_counts_even_while_the_pipe_is_open() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", COORDINATOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as coordinator:
        assert coordinator.stdout is not None
        group = psutil.Process(int(coordinator.stdout.readline()))
        coordinator.kill()
    psutil.wait_procs([group])


def test_a_killed_reaper_does_not_stop_the_coordinator(groups: list[subprocess.Popen[bytes]]) -> None:
    reaper = Reaper()
    reaper._process.kill()
    reaper._process.wait()
    reaper.watch(groups[0].pid)
    reaper.close()
    assert groups[0].poll() is None
