"""Plain data of an elastic client's work: its batches, its identity, and the result."""

from __future__ import annotations

from dataclasses import dataclass

BETA = 0.9
"""Sum of all clients' pulls (arXiv 1412.6651): with K clients each has a K-th of it."""


@dataclass(frozen=True)
class Work:
    """The next batches of a client, and its exchanges meanwhile."""

    epoch: int
    start: int
    stop: int
    """The batches of the epoch from `start` to before `stop`."""
    mode: str
    """elastic, async or allreduce."""
    tau: int
    """Steps between two exchanges."""
    alpha: float


@dataclass(frozen=True)
class ClientAssignment:
    """A client, and one of its workers by rank."""

    client: int
    version: int
    """Number of finished units of the client; 0 for one that starts from the centre."""
    rank: int = 0
    size: int = 1
    shards: int = 1


@dataclass(frozen=True)
class ClientDone:
    """The result of a client's unit; in a gang, as counted by each worker."""

    steps: int
    rows: int
    loss_sum: float
    exchanges: int
    server_bytes: int
    collective_bytes: int
