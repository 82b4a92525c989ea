"""Nodes that are killed, stopped, drained and joined in the middle of a search, which ends with the same values."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest

import hydra_tune as ht
from hydra_tune.storage import open_storage
from hydra_tune.storage.details import events
from tests.cluster.conftest import Started
from tests.cluster.machines import Machines
from tests.cluster.slow_candidates import build_slow

pytestmark = pytest.mark.slow

GIVEN: dict[str, Any] = {"trials": 4, "sampler": "random", "seed": 5, "strategy": "whole", "checkpoint_seconds": 0.2}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float | None]:
    """The values of the same search on this machine."""
    url = f"sqlite:///{tmp_path_factory.mktemp('local')}/study.db"
    result = ht.search(build_slow, devices="2xcpu", storage=url, progress=False, **GIVEN)
    values = [record.value for record in result.trials]
    result.close()
    return values


class When:
    """Does something when the search has recorded so many checkpoints."""

    def __init__(self, checkpoints: int, do: Callable[[], None]) -> None:
        self._left, self._do = checkpoints, do
        self.done = threading.Event()

    def __call__(self, *_args: Any) -> None:
        self._left -= 1
        if self._left == 0:
            threading.Thread(target=self._run, name="asyncio_disturbance").start()

    def _run(self) -> None:
        self._do()
        self.done.set()


@pytest.fixture
def at_checkpoint(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], When]:
    """Does something when so many checkpoints have come home."""

    def arrange(count: int, do: Callable[[], None]) -> When:
        from hydra_tune.cluster.search import ClusterSearch

        when, shipped = When(count, do), ClusterSearch.shipped

        def noticed(self: ClusterSearch, number: int, size: int) -> None:
            shipped(self, number, size)
            when()

        monkeypatch.setattr(ClusterSearch, "shipped", noticed)
        return when

    return arrange


def noted(result: ht.SearchResult, kind: str) -> list[str]:
    with open_storage(result._url, read_only=True) as opened, opened.reading() as connection:
        return [event.message for event in events(connection, 1, None, 1000) if event.kind == kind]


def values(result: ht.SearchResult) -> list[float | None]:
    return [record.value for record in result.trials]


def agent_and_workers(machines: Machines, name: str) -> list[psutil.Process]:
    process = psutil.Process(machines.processes[name].pid)
    return [process, *process.children(recursive=True)]


def test_a_killed_agent_costs_no_retry_and_its_trial_goes_on_from_its_checkpoint(
    machines: Started, at_checkpoint: Any, undisturbed: list[float | None]
) -> None:
    nodes = machines([1, 1])
    at_checkpoint(2, lambda: os.kill(nodes.processes["n0"].pid, signal.SIGKILL))
    result = ht.search(build_slow, cluster="auto", progress=False, **GIVEN)
    assert values(result) == undisturbed
    assert any("node n0 has left" in message for message in noted(result, "node"))
    assert {record.state for record in result.trials} == {"COMPLETE"}


def test_a_silent_agent_is_given_up_and_its_late_words_are_refused_and_noted(
    machines: Started, at_checkpoint: Any, undisturbed: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hydra_tune.cluster.nodes.COORDINATOR_SILENCE", 1.5)  # less than the agent's own patience
    nodes = machines([1, 1])

    def stop() -> None:
        os.kill(nodes.processes["n0"].pid, signal.SIGSTOP)
        threading.Timer(3.0, os.kill, [nodes.processes["n0"].pid, signal.SIGCONT]).start()

    at_checkpoint(2, stop)
    result = ht.search(build_slow, cluster="auto", progress=False, **GIVEN | {"trials": 6})
    assert values(result)[:4] == undisturbed
    assert any("silent" in message for message in noted(result, "node"))
    assert any("came back after it was given up" in message for message in noted(result, "refused"))


def test_a_node_that_is_drained_gives_its_trials_away_after_a_checkpoint(
    machines: Started, at_checkpoint: Any, undisturbed: list[float | None]
) -> None:
    nodes = machines([1, 1])
    at_checkpoint(1, lambda: nodes.drain("n0"))
    result = ht.search(build_slow, cluster="auto", progress=False, **GIVEN)
    assert values(result) == undisturbed
    assert any("n0 has left: it was drained" in message for message in noted(result, "node"))


def test_a_node_that_joins_is_used(machines: Started, at_checkpoint: Any, undisturbed: list[float | None]) -> None:
    nodes = machines([1])
    at_checkpoint(1, lambda: nodes.join(1))
    result = ht.search(build_slow, cluster="auto", progress=False, **GIVEN)
    assert values(result) == undisturbed
    assert {str(record.device).partition("/")[0] for record in result.trials} == {"n0", "n1"}


def test_an_interrupted_search_goes_on_from_the_checkpoints_that_came_home(
    machines: Started, at_checkpoint: Any, undisturbed: list[float | None]
) -> None:
    machines([1, 1])
    at_checkpoint(2, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        ht.search(build_slow, cluster="auto", study="s", progress=False, **GIVEN)
    machines([1])
    result = ht.search(build_slow, cluster="auto", study="s", resume=True, progress=False, **GIVEN)
    assert values(result) == undisturbed


SEEDS = range(int(os.environ.get("HYDRA_TUNE_CLUSTER_SEEDS", "2")))


@pytest.mark.parametrize("seed", SEEDS)
def test_kills_at_random_moments(
    seed: int, machines: Started, at_checkpoint: Any, undisturbed: list[float | None]
) -> None:
    """Kill a worker, an agent, or another process of a node; no trial is lost or repeated."""
    chance = random.Random(seed)
    nodes = machines([1, 1, 1])

    def kill() -> None:
        name = chance.choice(["n0", "n1"])
        processes = agent_and_workers(nodes, name)
        chance.choice(processes).kill()

    at_checkpoint(chance.randrange(1, 6), kill)
    result = ht.search(build_slow, cluster="auto", progress=False, **GIVEN)
    assert values(result) == undisturbed
    assert [record.number for record in result.trials] == list(range(4))
