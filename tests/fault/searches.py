"""Searches that the fault tests start as processes of their own, kill, and resume."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil

import hydra_tune as ht
from hydra_tune.engine.template_client import SHARED
from hydra_tune.storage import open_storage
from hydra_tune.storage.queries import trial_records

SPEC = Path(__file__).parent / "slow_candidates.py"
COMMON = ["--trials", "3", "--sampler", "random", "--seed", "4", "--devices", "2xcpu", "--checkpoint-seconds", "0.3"]


def command(*arguments: str) -> list[str]:
    """Return a command line; `resume` and `export` get `--trust`: the build functions are in another folder."""
    trust = ["--trust", str(SPEC.parents[1])] if arguments[0] in ("resume", "export") else []
    return [sys.executable, "-m", "hydra_tune", *arguments, *trust]


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, cwd=folder, stdin=subprocess.DEVNULL)


@contextmanager
def started(*arguments: str, folder: Path, own_template: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A command that runs in the background; ended, with its workers, when the block is left.

    With `own_template` the workers are forked as they are for users, else from the template that all tests share.
    """
    process = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        env={**os.environ, SHARED: "" if own_template else os.environ[SHARED]},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """Poll `condition` until it is true, for facts that only another process knows; return its value."""
    print(f"waiting for {what}")  # shown where the wait is in vain
    while not (value := condition()):
        time.sleep(0.02)
    return value


def wait_for_checkpoint(folder: Path) -> Path:
    found: Path = wait_for(
        lambda: next(folder.glob("hydra_tune_files/study-*/trial-*/step-*.json"), None), "a checkpoint"
    )
    return found


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The workers of the one search that runs, which its own template or the shared one has forked."""
    children = [*psutil.Process(process.pid).children(), *psutil.Process().children()]
    templates = [child for child in children if "hydra_tune.engine.template" in child.cmdline()]
    return [worker for template in templates for worker in template.children()]


def values(folder: Path, study: str) -> list[Any]:
    with open_storage(f"sqlite:///{folder}/hydra_tune.db", read_only=True) as storage:
        trials = trial_records(storage, study)
    return [(trial.number, trial.state, trial.params, trial.value) for trial in trials]


def outcomes(build: Any, trials: int, **options: Any) -> list[tuple[str, str]]:
    """Search here on one device; return each trial's state and error, also if no trial completes."""
    options = {"devices": "1xcpu", "study": "odd", "progress": False, "seed": 0} | options
    try:
        result = ht.search(build, trials=trials, **options)
    except ht.SearchFailed:
        result = ht.SearchResult("sqlite:///hydra_tune.db", "odd")
    with closing(result):
        return [(record.state, record.error or "") for record in result.trials]


def undisturbed(*arguments: str, folder: Path) -> list[Any]:
    """Run a search of the study `s` to its end; return the values of its trials."""
    done = run(*arguments, folder=folder)
    assert done.returncode == 0, done.stderr
    return values(folder, "s")


def kill_and_reap(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
