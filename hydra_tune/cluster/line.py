"""One TCP line between the coordinator and an agent: greeting, checked frames, beats.

The line has a lease: an agent that hears nothing for `AGENT_SILENCE` seconds ends itself; the coordinator gives a
silent node up only after `COORDINATOR_SILENCE` seconds, when the agent has ended. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import time
from collections.abc import Awaitable, Callable
from typing import Any

from hydra_tune.cluster import framing
from hydra_tune.cluster.framing import Keys, Opener, Refused, Sealer
from hydra_tune.cluster.messages import Beat

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
AGENT_SILENCE = 8.0
"""Seconds of silence after which an agent ends itself."""
COORDINATOR_SILENCE = 12.0
"""Seconds of silence after which the coordinator gives a node up; longer, so that the agent has ended by then."""
GREETING_SECONDS = 10.0
"""Seconds for a greeting, which takes two round trips."""
LARGEST_HELLO = 1 << 16
"""Bytes of the first frame of each end, which is JSON."""
_CHUNK = 1 << 18


class Line:
    """One end of an established line."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sealer: Sealer, opener: Opener
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._sealer = sealer
        self._opener = opener
        self._waiting: list[bytes] = []
        self._handling = False
        """True while a message is handled: more may have arrived, which nobody has read."""
        self.heard = time.monotonic()
        """When the other end was last heard, by the monotonic clock."""
        self.closed = False

    def send(self, message: object) -> None:
        """Send a message; one on a closed line is dropped, as its reader notices the end too."""
        self._send(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))

    def _send(self, payload: bytes) -> None:
        if not self.closed and not self._writer.is_closing():
            self._writer.write(self._sealer.seal(payload))

    async def drained(self) -> None:
        """Wait until most of what was sent has left this process; raises ConnectionError if the line is closed."""
        await self._writer.drain()

    async def messages(self, handle: Callable[[Any], Awaitable[None]]) -> str:
        """Pass on each message, one after another, until the line ends; return the reason."""
        try:
            while True:
                self._handling = True
                for payload in self._taken():
                    await handle(pickle.loads(payload))
                self._handling = False
                data = await self._reader.read(_CHUNK)
                if not data:
                    return "the connection was closed"
                self.heard = time.monotonic()
                self._waiting += self._opener.feed(data)
        except (ConnectionError, TimeoutError, OSError) as error:
            return f"the connection was lost ({error})"
        except Refused as error:
            return f"its line was closed: {error}"

    def _taken(self) -> list[bytes]:
        waiting, self._waiting = self._waiting, []
        return waiting

    async def silent_for(self, seconds: float) -> None:
        """Send a beat each second; return when the other end has been silent for so long."""
        while True:
            self.send(Beat(time.time()))
            if self._handling:
                self.heard = time.monotonic()
            left = self.heard + seconds - time.monotonic()
            if left <= 0:
                return
            await asyncio.sleep(min(BEAT_SECONDS, left))

    def send_hello(self, hello: dict[str, Any]) -> None:
        """Send plain data as JSON, which another version of Python reads too."""
        self._send(json.dumps(hello).encode())

    async def hello(self) -> dict[str, Any]:
        """Return the plain data that the other end has sent first."""
        while not self._waiting:
            data = await self._reader.read(_CHUNK)
            if not data:
                raise ConnectionError("the connection was closed during the greeting")
            self._waiting += self._opener.feed(data)
        found = json.loads(self._waiting.pop(0))
        if not isinstance(found, dict):
            raise Refused("the greeting is not a mapping")
        return found

    def close(self) -> None:
        """Close the line, once what was sent has left."""
        self.closed = True
        self._writer.close()

    def cut(self) -> None:
        """Close the line at once."""
        self.closed = True
        self._writer.transport.abort()


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> Line:
    """Return the coordinator's end of a new connection; raises Refused if the other end does not know the secret."""
    ours = framing.new_nonce()
    async with asyncio.timeout(GREETING_SECONDS):
        writer.write(framing.GREETING + ours)
        if await reader.readexactly(len(framing.GREETING)) != framing.GREETING:
            raise Refused("the other end is no agent of this version")
        theirs = await reader.readexactly(framing.NONCE_BYTES)
        framing.check_proof(await reader.readexactly(framing.PROOF_BYTES), secret, "agent", ours, theirs)
        writer.write(framing.proof(secret, "coordinator", ours, theirs))
    return _line(reader, writer, framing.session_keys(secret, ours, theirs), at_agent=False)


async def connect(host: str, port: int, secret: bytes) -> Line:
    """Return the agent's end of a connection to the coordinator; raises OSError, TimeoutError or Refused."""
    async with asyncio.timeout(GREETING_SECONDS):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            if await reader.readexactly(len(framing.GREETING)) != framing.GREETING:
                raise Refused("the other end is no coordinator of this version")
            theirs, ours = await reader.readexactly(framing.NONCE_BYTES), framing.new_nonce()
            writer.write(framing.GREETING + ours + framing.proof(secret, "agent", theirs, ours))
            framing.check_proof(await reader.readexactly(framing.PROOF_BYTES), secret, "coordinator", theirs, ours)
        except BaseException:
            writer.close()
            raise
    return _line(reader, writer, framing.session_keys(secret, theirs, ours), at_agent=True)


def _line(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, keys: Keys, *, at_agent: bool) -> Line:
    out, into = (keys.to_coordinator, keys.to_agent) if at_agent else (keys.to_agent, keys.to_coordinator)
    return Line(reader, writer, Sealer(out), Opener(into))
