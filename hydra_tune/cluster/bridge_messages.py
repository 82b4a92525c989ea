"""Messages between the coordinator and its bridge, over the channel of a child process."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Connected:
    """The bridge is Ray's driver now."""

    host: str
    """This machine's address as nodes see it."""
    ray: str
    """Ray's version."""


@dataclass(frozen=True)
class Refused:
    """The bridge could not connect."""

    because: str


@dataclass(frozen=True)
class Invite:
    """Start an agent on every node, to connect to this address."""

    host: str
    port: int
    secret: bytes = field(repr=False)
    run: str
    """Tells the agents of this run from others."""
    connected: dict[str, str] = field(default_factory=dict)
    """Names of nodes by id that have an agent already, from an earlier bridge of this run."""


@dataclass(frozen=True)
class Want:
    """Ask for devices for so many trials at once."""

    trials: int


@dataclass(frozen=True)
class Joined:
    """The agent of this node has connected to the coordinator."""

    node: str


@dataclass(frozen=True)
class Free:
    """The agent of this node, started by an earlier bridge, has left."""

    node: str


@dataclass(frozen=True)
class End:
    """End all agents and disconnect."""
