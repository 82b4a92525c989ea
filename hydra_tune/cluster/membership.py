"""Interface to whatever knows the machines of a cluster, and starts an agent on each: Ray, by way of the bridge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class News(StrEnum):
    """Kinds of changes that a membership reports."""

    DRAINED = "drained"
    """A node is about to leave."""
    FAILED = "failed"
    """A node cannot take part."""
    NOTED = "noted"
    """Something to know of a node, which may take part later."""
    UNREACHABLE = "unreachable"
    """The cluster does not answer for now; nodes with agents go on."""
    GAVE_UP = "gave up"
    """The cluster cannot be used at all."""


@dataclass(frozen=True)
class NodeNews:
    """News of a node, or of the whole cluster if `node` is empty."""

    kind: News
    node: str = ""
    """Ray's id of the node."""
    name: str = ""
    text: str = ""
    hint: str = ""


class Membership(Protocol):
    """Starts agents on the machines of a cluster, those that join later too."""

    async def open(self, hear: Callable[[NodeNews], None]) -> str:
        """Connect to the cluster; return this machine's address as nodes see it. Raises HydraTuneError."""
        ...

    def invite(self, host: str, port: int, secret: bytes) -> None:
        """Start an agent on every node, now and when one joins, to connect to this address."""
        ...

    def want(self, trials: int) -> None:
        """Ask for devices for so many trials at once; an autoscaling cluster adds nodes."""
        ...

    def connected(self, id: str, name: str) -> None:
        """Take note that a node's agent has connected."""

    def free(self, id: str) -> None:
        """Take note that a node's agent has left: it may get another."""

    async def close(self) -> None:
        """End all agents that still run, and disconnect."""
        ...
