"""Fixtures for all tests: each runs in a folder of its own, and fails when it leaves something behind."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import hydra_tune.coordinator  # noqa: F401 - imported here once: torch keeps the frames that first import it

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of a test, so that default databases and files land there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_TUNE_STORAGE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _threads() -> set[str]:
    # Pools that libraries keep for the life of the process are theirs.
    kept = ("ThreadPoolExecutor", "asyncio_", "pymp-", "QueueFeeder")
    return {thread.name for thread in threading.enumerate() if not thread.name.startswith(kept)}


def _open_files() -> set[str]:
    return {file.path for file in psutil.Process().open_files()}


def _shared_memory() -> set[str]:
    place, ours = Path("/dev/shm"), f"hydra-tune-run-{os.getpid()}-"
    return {entry.name for entry in place.iterdir() if entry.name.startswith(ours)} if place.is_dir() else set()


def pytest_collection_finish() -> None:
    """What imports left behind is not looked at again by each test's garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_leaks(own_folder: Path) -> Iterator[None]:
    """A test that leaves a process, a thread, an open file or a shared-memory segment fails."""
    before = {probe: probe() for probe in (_children, _threads, _open_files, _shared_memory)}
    environment = dict(os.environ)
    yield
    # Twice: what a finalizer lets go of in the first pass is freed in the second.
    gc.collect()
    gc.collect()
    for probe, there in before.items():
        left = probe() - there
        assert not left, f"the test left behind ({probe.__name__.strip('_')}): {left}"
    changed = {k for k in os.environ.keys() | environment.keys() if os.environ.get(k) != environment.get(k)}
    # What the fixture above has set may be undone by a test that undoes its own changes.
    ours = ("PYTEST_", "TORCHINDUCTOR_", "KMP_", "XDG_CACHE_HOME")
    changed = {name for name in changed if not name.startswith(ours)}
    assert not changed, f"the test changed the environment: {changed}"
