"""Runs commands as real processes, and provides one finished search for the commands that read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
Command = Callable[..., subprocess.CompletedProcess[str]]


def run_command(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hydra_tune", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, stdin=subprocess.DEVNULL)


@pytest.fixture
def hydra_tune(tmp_path: Path) -> Command:
    """Run a command in the test's own folder."""
    return lambda *arguments: run_command(*arguments, cwd=tmp_path)


@pytest.fixture(scope="session")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The folder of a finished search of `examples/digits.yaml`, and what the command printed."""
    folder = tmp_path_factory.mktemp("searched")
    done = run_command(
        "search", EXAMPLES / "digits.yaml", "--json", "--study", "digits", "--trials", "4", "--epochs", "2",
        "--sampler", "random", cwd=folder,
    )  # fmt: skip
    return folder, done


@pytest.fixture
def look(searched: tuple[Path, subprocess.CompletedProcess[str]]) -> Command:
    """Run a command where the search was."""
    return lambda *arguments: run_command(*arguments, cwd=searched[0])
