"""What the coordinator makes of an attempt's end on a node."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hydra_tune.cluster.messages import Ended
from hydra_tune.cluster.node import Node, Running, State
from hydra_tune.cluster.nodes import LOSSES, LostTooOften, Nodes
from hydra_tune.cluster.placing import Size
from hydra_tune.coordinator.attempts import Elsewhere
from hydra_tune.coordinator.trial_facts import TrialFacts
from hydra_tune.core.devices import Device
from hydra_tune.core.errors import NoRoom
from hydra_tune.core.states import Outcome, Status
from hydra_tune.strategies.base import Interrupted
from hydra_tune.training.remote_trial import TrialInfo

DEVICE = Device("cpu:0", "cpu", 1, 1)
INFO = TrialInfo(7, 1, "a")


class Wire:
    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: object) -> None:
        self.sent.append(message)

    def close(self) -> None:
        self.sent.append("closed")


class Owner:
    """The owner's notes, and as many trials to come as devices."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, number: int | None, kind: str, message: str) -> None:
        self.notes.append(message)

    def nodes_changed(self) -> None:
        return

    def at_once(self, devices: int) -> int:
        return devices

    def to_come(self) -> int:
        return 0


def made(*sizes: Size) -> tuple[Nodes, list[Node]]:
    owner: Any = Owner()
    begin: Any = None
    nodes = Nodes(owner, begin, asyncio.Event())
    for i, size in enumerate(sizes):
        line: Any = Wire()
        nodes.nodes[f"n{i}"] = Node(f"id{i}", f"n{i}", line, State.READY, (DEVICE,), size)
    return nodes, list(nodes.nodes.values())


def ended(outcome: Outcome | None, error: Exception | None = None) -> Ended:
    return Ended(7, "a", outcome, TrialFacts(), error)


def test_out_of_memory_is_final_on_the_largest_node_only() -> None:
    nodes, (small, large) = made(Size(1, 1, 1), Size(2, 2, 1))
    outcome = Outcome(Status.OUT_OF_MEMORY, error="too large")
    with pytest.raises(Elsewhere):
        nodes._outcome(small, INFO, ended(outcome))
    assert nodes._outcome(large, INFO, ended(outcome)) is outcome


def test_a_full_disk_takes_a_node_out_unless_it_is_the_last() -> None:
    nodes, (first, second) = made(Size(), Size())
    with pytest.raises(Elsewhere):
        nodes._outcome(first, INFO, ended(None, NoRoom("the disk is full")))
    assert first.state is State.GONE
    assert str(nodes.refused["n0"]) == "the disk is full"
    with pytest.raises(NoRoom):
        nodes._outcome(second, INFO, ended(None, NoRoom("the disk is full")))


def test_an_interrupted_attempt_goes_on_elsewhere_unless_the_search_stops() -> None:
    nodes, (node,) = made(Size())
    with pytest.raises(Elsewhere):
        nodes._outcome(node, INFO, ended(None))
    nodes.stop.set()
    with pytest.raises(Interrupted):
        nodes._outcome(node, INFO, ended(None))


def test_a_trial_that_is_lost_with_many_nodes_counts_as_lost() -> None:
    async def lose() -> list[BaseException | None]:
        nodes, every = made(*[Size()] * (LOSSES + 1))
        futures = []
        for node in every:
            futures.append(asyncio.get_running_loop().create_future())
            node.running["a"] = Running(7, TrialFacts(), futures[-1])
            nodes.lost(node, "its plug was pulled")
        return [future.exception() for future in futures]

    errors = asyncio.run(lose())
    assert [type(error) for error in errors] == [Elsewhere] * LOSSES + [LostTooOften]
