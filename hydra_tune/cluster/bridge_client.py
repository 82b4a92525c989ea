"""The coordinator's side of the bridge: starts it, hears its news, and starts another when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import pickle
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import IO, Any

from hydra_tune.cluster.bridge_messages import Connected, End, Free, Invite, Joined, Refused, Want
from hydra_tune.cluster.membership import News, NodeNews
from hydra_tune.core.errors import HydraTuneError, SpecError
from hydra_tune.engine.channel import Channel, Closed

CONNECT_SECONDS = 60.0
"""Seconds that the bridge gets to connect; Ray looks for a head for some of them."""
END_SECONDS = 10.0
"""Seconds that the bridge gets to end its agents; then it is killed."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 15.0
"""Seconds before another bridge is started after one has ended."""


class RayMembership:
    """The nodes of a Ray cluster, by way of a bridge process."""

    def __init__(self, address: str) -> None:
        """`address` is auto, or HOST:PORT of the head."""
        if importlib.util.find_spec("ray") is None:
            raise SpecError("a search on a cluster needs Ray", "pip install 'hydra-tune[ray]' on every machine")
        self._address = address
        self._run = secrets.token_hex(4)
        self._invite: Invite | None = None
        self._connected: dict[str, str] = {}
        self._trials = 0
        self._channel: Channel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._closing = False

    async def open(self, hear: Callable[[NodeNews], None]) -> str:
        """Connect to the cluster; return this machine's address as nodes see it. Raises HydraTuneError."""
        self._hear = hear
        answer = await self._start()
        if isinstance(answer, Connected):
            return answer.host
        await self.close()
        raise HydraTuneError(
            f"the Ray cluster {self._address!r} cannot be reached from this machine: {answer}",
            "start Ray here with ray start --address=HEAD:6379, and give auto or the head's HOST:PORT",
        )

    def invite(self, host: str, port: int, secret: bytes) -> None:
        """Start an agent on every node, now and when one joins, to connect to this address."""
        self._invite = Invite(host, port, secret, self._run)
        self._send(self._invite)

    def want(self, trials: int) -> None:
        """Ask for devices for so many trials at once; an autoscaling cluster adds nodes."""
        self._trials = trials
        self._send(Want(trials))

    def connected(self, id: str, name: str) -> None:
        """Take note that a node's agent has connected."""
        self._connected[id] = name
        self._send(Joined(id))

    def free(self, id: str) -> None:
        """Take note that a node's agent has left: it may get another."""
        self._connected.pop(id, None)
        self._send(Free(id))

    async def close(self) -> None:
        """End all agents that still run, and disconnect."""
        self._closing = True
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.gather(self._restarting, return_exceptions=True)
        self._send(End())
        await self._reap(END_SECONDS)

    def _send(self, message: object) -> None:
        if self._channel is not None:
            with contextlib.suppress(Closed):  # the reader notices the end too
                self._channel.send(message)

    async def _start(self) -> Connected | str:
        """Start a bridge; return its first answer, or the reason why there is none."""
        ours, theirs = socket.socketpair()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the bridge is reaped
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hydra_tune.cluster.bridge", str(theirs.fileno()), self._address],
            stdin=subprocess.DEVNULL, stdout=self._said, stderr=self._said, pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONSAFEPATH": "1"}, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        self._channel = Channel(ours)
        self._first: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(ours.fileno(), self._read, self._channel)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                answer = await self._first
        except TimeoutError:
            answer = f"no answer within {CONNECT_SECONDS:g} s"
        if isinstance(answer, Connected):
            return answer
        return answer.because if isinstance(answer, Refused) else str(answer)

    def _read(self, channel: Channel) -> None:
        try:
            arrived = channel.receive_ready()
        except Closed:
            self._ended(channel)
            return
        for data in arrived:
            message = pickle.loads(data)
            if isinstance(message, NodeNews):
                self._hear(message)
            elif not self._first.done():
                self._first.set_result(message)

    def _ended(self, channel: Channel) -> None:
        """Start another bridge after one that has ended before its time; nodes with agents go on meanwhile."""
        asyncio.get_running_loop().remove_reader(channel.fileno())
        if not self._first.done():
            self._first.set_result(f"the bridge to Ray has ended: {self._last_words()}")
            return
        if not self._closing and self._restarting is None:
            self._hear(NodeNews(News.UNREACHABLE, text="the bridge to Ray has ended: nodes that take part go on, and "
                                "others join once there is another"))  # fmt: skip
            self._restarting = asyncio.create_task(self._restart())

    async def _restart(self) -> None:
        pause = FIRST_PAUSE
        while not self._closing:
            await self._reap(END_SECONDS)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            if isinstance(await self._start(), Connected):
                break
        self._restarting = None
        assert self._invite is not None
        self._send(Invite(self._invite.host, self._invite.port, self._invite.secret, self._run, dict(self._connected)))
        self._send(Want(self._trials))
        self._hear(NodeNews(News.UNREACHABLE, text="there is another bridge to Ray"))

    async def _reap(self, seconds: float) -> None:
        """Wait for the bridge's end, and kill it after so many seconds."""
        process, channel, said = self._process, self._channel, self._said
        self._process = self._channel = self._said = None
        if process is None or channel is None or said is None:
            return
        try:
            await asyncio.wait_for(asyncio.to_thread(process.wait), seconds)
        except TimeoutError:
            process.kill()
            await asyncio.to_thread(process.wait)
        asyncio.get_running_loop().remove_reader(channel.fileno())
        channel.close()
        said.close()

    def _last_words(self) -> str:
        if self._said is None:
            return "nobody knows why"
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it said nothing"
