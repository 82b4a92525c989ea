"""What `hydra-tune doctor --cluster` says of a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hydra_tune.cluster.doctor import _port, examine, state
from hydra_tune.cluster.versions import versions


@pytest.fixture
def found(own_folder: Path) -> dict[str, Any]:
    (own_folder / "probe").touch()
    with _port("127.0.0.1") as (host, port):
        return examine(host, port, str(own_folder / "probe"), 2, 0, 2 * 2**30)


def test_a_node_that_lacks_nothing(found: dict[str, Any]) -> None:
    healthy = state("n0", 2, 0, found | {"disk": 2**40})
    assert healthy.ok
    assert healthy.says.startswith("n0: ok; cpu:0 1.0 GiB, cpu:1 1.0 GiB; ")
    assert "sees this machine's files" in healthy.says


@pytest.mark.parametrize(
    ("changes", "cpus", "says"),
    [
        ({"versions": versions() | {"torch": "1.0"}}, 2, "it has torch 1.0 instead of"),
        ({"disk": 2**20}, 2, "only 1.0 MiB of disk are free"),
        ({"unreachable": "10.0.0.1:7, timed out"}, 2, "cannot reach this machine (10.0.0.1:7, timed out)"),
        ({}, 0, "Ray counts no CPU and no GPU there"),
    ],
)
def test_what_a_node_lacks(changes: dict[str, Any], cpus: int, says: str, found: dict[str, Any]) -> None:
    sick = state("n0", cpus, 0, found | {"disk": 2**40} | changes)
    assert not sick.ok
    assert says in sick.says


def test_a_closed_port_is_unreachable(own_folder: Path) -> None:
    with _port("127.0.0.1") as (host, port):
        pass
    assert f"{host}:{port}" in examine(host, port, "none", 1, 0, 0)["unreachable"]
