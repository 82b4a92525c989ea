"""The start order of an agent: where to connect, and what it may use."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Order:
    """Arguments with which an agent is started."""

    host: str
    """Address of the coordinator."""
    port: int
    secret: str
    """The search's secret, in hexadecimal."""
    node: str
    """Ray's id of the node."""
    name: str
    """The node's name for people."""
    cpus: int
    gpus: int
    memory: int = 0
    """Bytes of memory that Ray counts on the node; 0 if it counts none."""

    def text(self) -> str:
        """Return the order as one line."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def read(cls, line: str) -> Order:
        return cls(**json.loads(line))
