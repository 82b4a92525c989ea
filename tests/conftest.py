"""Fixtures for all tests: each runs in a folder of its own, and fails when it leaves something behind."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

# Before torch is loaded. Several tests share the cores, and threads that spin while they wait for each other take them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import psutil
import pytest
import torch

import hydra_tune.coordinator.search  # noqa: F401 - imported here once: torch keeps the frames that first import it
from hydra_tune.engine.template_client import SHARED, shared_template

torch.set_num_threads(1)
TEMPLATE_MODULES = (
    "torch", "torch._dynamo", "hydra_tune.planner.survey", "hydra_tune.strategies.registry",
    "hydra_tune.strategies.elastic.units", "hydra_tune.strategies.shard.units", "hydra_tune.strategies.sparse.units",
    "pytorch_lightning", "lightning.pytorch",
)  # fmt: skip


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
    kept = ("ThreadPoolExecutor", "asyncio_", "pymp-", "QueueFeeder", "AnyIO worker")
    return {thread.name for thread in threading.enumerate() if not thread.name.startswith(kept)}


def _open_files() -> set[str]:
    return {file.path for file in psutil.Process().open_files()}


def _shared_memory() -> set[str]:
    place, ours = Path("/dev/shm"), f"hydra-tune-search-{os.getpid()}-"
    return {entry.name for entry in place.iterdir() if entry.name.startswith(ours)} if place.is_dir() else set()


_ended_last = ExitStack()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Fork the workers of all searches under test from one template, which imports torch once.

    With pytest-xdist each of its processes has one, so that left-over workers are found among its own children.
    """
    runs_tests = hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None)
    if sys.platform == "linux" and runs_tests and not session.config.option.collectonly:
        folder = _ended_last.enter_context(tempfile.TemporaryDirectory())
        path = os.path.join(folder, "template")
        _ended_last.enter_context(shared_template(path, TEMPLATE_MODULES))
        os.environ[SHARED] = path


def pytest_sessionfinish() -> None:
    os.environ.pop(SHARED, None)
    _ended_last.close()


@pytest.fixture
def own_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let searches start a template of their own, as they do for users."""
    monkeypatch.delenv(SHARED, raising=False)


SLOWEST = ("fault", "lightning", "strategies", "automl", "e2e")
"""Folders whose files take longest: they begin first, so that no long one begins last."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the files of the slowest folders first."""

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        return SLOWEST.index(folder) if folder in SLOWEST else len(SLOWEST)

    items.sort(key=place)


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
    ours = ("PYTEST_", "TORCHINDUCTOR_", "KMP_", "XDG_CACHE_HOME", SHARED)
    changed = {name for name in changed if not name.startswith(ours)}
    assert not changed, f"the test changed the environment: {changed}"
