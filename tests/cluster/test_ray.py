"""Searches on a Ray cluster of several raylets on this machine: one is killed, one joins and one is drained."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import hydra_tune as ht
from hydra_tune.core.errors import HydraTuneError
from hydra_tune.storage import open_storage
from hydra_tune.storage.details import events
from tests.cluster.raylets import Raylets, agents_of, bridges, until
from tests.cluster.slow_candidates import build_slow

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'hydra-tune[ray]'"
    ),
]

ROOT = Path(__file__).parents[2]
GIVEN: dict[str, Any] = {"sampler": "random", "seed": 5, "strategy": "whole", "checkpoint_seconds": 0.2}


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    """Three nodes of one, two and three CPUs."""
    made = Raylets()
    try:
        for cpus in (1, 2, 3):
            made.start(cpus)
        yield made
    finally:
        made.close()


def records(result: ht.SearchResult) -> list[tuple[float | None, str]]:
    return [(record.value, record.state) for record in result.trials]


def test_one_node_is_killed_one_joins_and_one_is_drained(raylets: Raylets, tmp_path: Path) -> None:
    local = ht.search(build_slow, devices="2xcpu", storage=f"sqlite:///{tmp_path}/local.db", progress=False, trials=12,
                      **GIVEN)  # fmt: skip

    begun = threading.Event()

    def ended(study: object, trial: object) -> None:
        begun.set()

    def disturb() -> None:
        begun.wait()
        bridges(raylets.address)[0].kill()
        raylets.raylets[1].kill()
        raylets.start(2)
        raylets.drain(3)

    disturbing = threading.Thread(target=disturb, name="asyncio_disturbance")
    disturbing.start()
    result = ht.search(build_slow, cluster=raylets.address, callbacks=[ended], trials=12, **GIVEN)
    disturbing.join()
    assert records(result) == records(local)
    with open_storage(result._url, read_only=True) as opened, opened.reading() as connection:
        said = " | ".join(event.message for event in events(connection, 1, None, 1000))
    assert "there is another bridge to Ray" in said
    assert "has left: the connection was closed" in said


def test_the_end_of_the_coordinator_ends_everything_on_the_nodes(raylets: Raylets, tmp_path: Path) -> None:
    script = tmp_path / "search.py"
    script.write_text(
        "import hydra_tune as ht\nfrom tests.cluster.slow_candidates import build_slow\n"
        f"ht.search(build_slow, cluster='{raylets.address}', trials=1000, sampler='random')\n"
    )
    process = subprocess.Popen(
        [sys.executable, str(script)], stderr=subprocess.PIPE, env={**_environment(), "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
    )  # fmt: skip
    assert process.stderr is not None
    with process.stderr as lines:
        while b"COMPLETE" not in lines.readline():
            assert process.poll() is None
        process.kill()
    process.wait()
    head = raylets.raylets[0]
    until(lambda: not agents_of(head) and not bridges(raylets.address))


def test_an_unreachable_head_is_one_line() -> None:
    with pytest.raises(HydraTuneError, match="cannot be reached from this machine"):
        ht.search(build_slow, cluster="127.0.0.1:1", trials=1, progress=False)


def _environment() -> dict[str, str]:
    return dict(psutil.Process().environ())
