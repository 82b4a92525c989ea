"""Takes in the lines of agents: only those that know the secret and have the coordinator's versions."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from hydra_tune.cluster.framing import Refused
from hydra_tune.cluster.line import GREETING_SECONDS, Line, accept
from hydra_tune.cluster.versions import difference, versions
from hydra_tune.core.errors import HydraTuneError

logger = logging.getLogger(__name__)

Serve = Callable[[dict[str, Any], Line], Awaitable[None]]


class Listener:
    """The port of a search, to which agents connect."""

    def __init__(self, secret: bytes, serve: Serve, refuse: Callable[[str, HydraTuneError], None]) -> None:
        """`serve` gets the greeting and the line of each agent; `refuse` the name of a node that is not used."""
        self._secret = secret
        self._serve = serve
        self._refuse = refuse
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def open(self, host: str, port: int) -> AsyncIterator[int]:
        """Listen, by default (`port` 0) on a free port; yield the port."""
        try:
            server = await asyncio.start_server(self._on_connection, host, port)
        except OSError as error:
            raise HydraTuneError(
                f"nodes cannot connect to {host}:{port} ({error.strerror or error})",
                "give a free port as HYDRA_TUNE_CLUSTER_PORT",
            ) from error
        try:
            yield int(server.sockets[0].getsockname()[1])
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._take_in(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")
        try:
            line = await accept(reader, writer, self._secret)
            async with asyncio.timeout(GREETING_SECONDS):
                hello = await line.hello()
        except (Refused, OSError, TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
            logger.warning("a connection from %s was refused: %s", peer, error)
            writer.transport.abort()
            return
        name = _name(hello)
        wrong = difference(hello, versions())
        if wrong:
            reason = HydraTuneError(f"node {name} has {wrong}", "install the coordinator's versions there")
            line.send_hello({"refused": str(reason)})
            line.close()
            self._refuse(name, reason)
            return
        line.send_hello({"refused": ""})
        await self._serve({**hello, "name": name}, line)


def _name(hello: dict[str, Any]) -> str:
    """Return a node's name: short, printable, without the slash that separates node and device."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", str(hello.get("name", "")))[:60] or "node"
