"""A database with every kind of study and trial, a client of the guarded application, and real servers."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import optuna
import pytest

import hydra_tune as ht
from benchmarks.many_trials import write_study
from hydra_tune.dashboard.app import guarded, make_app
from hydra_tune.dashboard.security import Policy, hosts_for
from tests.dashboard.studies import HOSTILE, build_troubled, build_two_objectives, hostile_objective

pytest.importorskip("fastapi", reason="fastapi is not installed")
from starlette.testclient import TestClient

TOKEN = "a-token-of-enough-characters"


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `seen.db`: real searches, a plain Optuna study, and one with many made-up trials."""
    folder = tmp_path_factory.mktemp("filled")
    url = f"sqlite:///{folder}/seen.db"
    common = {"storage": url, "devices": "2xcpu", "progress": False, "seed": 0}
    ht.search(build_troubled, trials=6, metric="accuracy", direction="maximize", study="troubled", **common)
    objectives = {"metric": ["loss", "accuracy"], "direction": ["minimize", "maximize"]}
    ht.search(build_two_objectives, trials=5, study="two", **objectives, **common)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.RDBStorage(url)
    study = optuna.create_study(study_name=HOSTILE, storage=storage)
    study.optimize(hostile_objective, n_trials=4, catch=(RuntimeError,))
    storage.remove_session()
    storage.engine.dispose()
    write_study(url, "many", trials=600, reports=10)
    return folder


@pytest.fixture
def url(filled: Path, tmp_path: Path) -> str:
    """A copy of that database for one test."""
    for part in filled.glob("seen.db*"):
        shutil.copy(part, tmp_path / part.name)
    return f"sqlite:///{tmp_path}/seen.db"


Client = Callable[..., TestClient]


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    """Clients of the guarded application on that database."""
    opened: list[TestClient] = []

    def make(*, token: str | None = None, actions: bool = False, base: str = "http://localhost:8080") -> TestClient:
        policy = Policy(hosts=hosts_for("127.0.0.1"), token=token, actions=actions)
        found = TestClient(guarded(make_app(url, policy)), base_url=base, raise_server_exceptions=False)
        found.__enter__()
        opened.append(found)
        return found

    yield make
    for one in opened:
        one.__exit__(None, None, None)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(*arguments: str, cwd: Path) -> Iterator[tuple[str, str]]:
    """`hydra-tune dashboard` as a real process: its address, and the address to log in with."""
    command = [sys.executable, "-m", "hydra_tune", "dashboard", "--port", "0", *arguments]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=cwd)
    try:
        said = ""
        assert server.stderr is not None
        for line in server.stderr:
            said += line
            if "Ctrl-C" in line:
                break
        found = re.search(r"(http://[^ ]+/)$", said, flags=re.MULTILINE)
        assert found, said
        login = re.search(r"log in with (\S+)", said)
        yield found[1], login[1] if login else ""
    finally:
        server.terminate()
        server.communicate()
