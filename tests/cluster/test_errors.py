"""One line for each mistake with a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hydra_tune as ht
from hydra_tune.core.errors import HydraTuneError, SpecError
from tests.candidates import build_small
from tests.cluster.conftest import Started


@pytest.mark.parametrize("address", ["", "head", "head:", ":6379", "head:port", "head:99999", 6379])
def test_an_address_that_is_none(address: Any) -> None:
    with pytest.raises(SpecError, match=r"give auto, or the head's address such as 10\.0\.0\.1:6379"):
        ht.search(build_small, cluster=address, trials=1, progress=False)


def test_the_client_of_ray_is_refused() -> None:
    with pytest.raises(SpecError, match="ray job submit"):
        ht.search(build_small, cluster="ray://head:10001", trials=1, progress=False)


def test_sqlite_in_the_folder_of_a_job(tmp_path: Path) -> None:
    folder = tmp_path / "runtime_resources" / "working_dir_files" / "job"
    folder.mkdir(parents=True)
    with pytest.raises(SpecError, match="which is removed with the job"):
        ht.search(build_small, cluster="auto", storage=f"sqlite:///{folder}/a.db", trials=1, progress=False)


def test_a_strategy_that_no_node_can_run(machines: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hydra_tune.cluster.search.SETTLED_SECONDS", 0.0)
    machines([1])
    strategy = {"name": "elastic", "workers_per_client": 2}
    with pytest.raises(HydraTuneError, match="no node can be used: a client of 2 workers cannot run on 1 devices"):
        ht.search(build_small, cluster="auto", strategy=strategy, trials=1, progress=False)


def test_an_agent_that_cannot_reach_the_port_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    import asyncio

    from hydra_tune.cluster.agent import UNREACHABLE, serve
    from hydra_tune.cluster.order import Order

    assert asyncio.run(serve(Order("127.0.0.1", 1, "00", "id", "n0", 1, 0))) == UNREACHABLE
    assert "node n0 cannot reach the coordinator at 127.0.0.1:1" in capfd.readouterr().err
