"""Searches that the fault tests start as processes of their own, kill, and resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

SPEC = Path(__file__).parent / "slow_candidates.py"
COMMON = ["--trials", "3", "--sampler", "random", "--seed", "4", "--devices", "2xcpu", "--checkpoint-seconds", "0.3"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hydra_tune", *arguments]


def run(*arguments: str, folder: Path, timeout: float = 150) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, cwd=folder, timeout=timeout, stdin=subprocess.DEVNULL
    )


@contextmanager
def started(*arguments: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A command that runs in the background; ended, with its children, when the block is left."""
    process = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        stdin=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 60) -> Any:
    """What `condition` returns once it is true. For what only another process knows."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)
    return value


def wait_for_checkpoint(folder: Path) -> Path:
    found: Path = wait_for(
        lambda: next(folder.glob("hydra_tune_files/study-*/trial-*/step-*.json"), None), "a checkpoint"
    )
    return found


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "hydra_tune.engine.worker" in " ".join(child.cmdline())]


def values(folder: Path, study: str) -> list[Any]:
    trials = json.loads(run("trials", study, "--json", folder=folder).stdout)
    return [(trial["number"], trial["state"], trial["params"], trial["value"]) for trial in trials]


def kill_and_reap(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
