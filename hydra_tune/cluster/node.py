"""One node as the coordinator sees it: its line, its devices and its attempts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum

from hydra_tune.cluster.clock_offset import ClockOffset
from hydra_tune.cluster.line import Line
from hydra_tune.cluster.messages import Ended, Ready
from hydra_tune.cluster.placing import Place, Size
from hydra_tune.coordinator.trial_facts import TrialFacts
from hydra_tune.core.devices import Device


class State(StrEnum):
    """State of a node."""

    STARTING = "starting"
    """Its agent is connected, and starts its workers."""
    READY = "ready"
    DRAINING = "draining"
    """It is about to leave: its trials checkpoint and go on elsewhere."""
    GONE = "gone"


@dataclass
class Running:
    """An attempt on a node."""

    number: int
    facts: TrialFacts
    ended: asyncio.Future[Ended]


@dataclass
class Node:
    """One node with a connected agent."""

    id: str
    name: str
    line: Line
    state: State = State.STARTING
    devices: tuple[Device, ...] = ()
    size: Size = field(default_factory=Size)
    at_once: int = 0
    """Trials that are to run here at once."""
    rivals: int = 0
    running: dict[str, Running] = field(default_factory=dict)
    """Running attempts by id."""
    clock: ClockOffset = field(default_factory=ClockOffset)
    spilled: tuple[int, int] = (0, 0)
    """Bytes in its spill store, in host memory and on disk."""
    late: int = 0
    """Messages that arrived after the node was given up."""

    def became_ready(self, ready: Ready) -> None:
        """Take in the devices."""
        self.devices, self.state = ready.devices, State.READY
        memory = [device.memory for device in ready.devices]
        self.size = Size(max(memory), sum(memory), ready.host_bytes)

    def device(self, name: str) -> str:
        """Return the name of one of its devices among those of all nodes."""
        return f"{self.name}/{name}"

    def place(self) -> Place:
        return Place(self.name, self.size, self.at_once, len(self.running))
