"""Nodes without Ray: agents as processes of this machine, which join, are drained and are killed as a test wants."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hydra_tune.cluster.membership import News, NodeNews
from hydra_tune.cluster.order import Order


@dataclass
class Machines:
    """A membership whose nodes are processes; each entry of `cpus` is a node with so many CPUs."""

    cpus: Sequence[int]
    memory: Sequence[int] = ()
    """Bytes of memory of each node, as far as given."""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    wanted: list[int] = field(default_factory=list)
    _ids: itertools.count[int] = field(default_factory=itertools.count)

    async def open(self, hear: Callable[[NodeNews], None]) -> str:
        self._hear, self._loop = hear, asyncio.get_running_loop()
        return "127.0.0.1"

    def invite(self, host: str, port: int, secret: bytes) -> None:
        self._address = host, port, secret
        for i, cpus in enumerate(self.cpus):
            self.join(cpus, self.memory[i] if i < len(self.memory) else 0)

    def want(self, trials: int) -> None:
        self.wanted.append(trials)

    def connected(self, id: str, name: str) -> None:
        """Nothing to do: agents are not started again."""

    def free(self, id: str) -> None:
        """Nothing to do: agents are not started again."""

    def join(self, cpus: int, memory: int = 0) -> str:
        """Start an agent; from any thread."""
        host, port, secret = self._address
        name = f"n{next(self._ids)}"
        process = subprocess.Popen(
            [sys.executable, "-m", "hydra_tune.cluster.agent"], stdin=subprocess.PIPE, start_new_session=True,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(Order(host, port, secret.hex(), name, name, cpus, 0, memory).text().encode())
        process.stdin.flush()
        self.processes[name] = process
        return name

    def drain(self, name: str) -> None:
        """Announce that a node will leave; from any thread."""
        news = NodeNews(News.DRAINED, name, name, "its machine is about to be taken away")
        self._loop.call_soon_threadsafe(self._hear, news)

    async def close(self) -> None:
        for process in self.processes.values():
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes.values():
            await asyncio.to_thread(process.wait)
