"""The line over real sockets: who lacks the secret or sends garbage is dropped, and nothing of it is unpickled."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from hydra_tune.cluster import framing
from hydra_tune.cluster.framing import Refused, Sealer
from hydra_tune.cluster.line import Line, connect
from hydra_tune.cluster.listener import Listener
from hydra_tune.cluster.messages import Beat, Leave
from hydra_tune.cluster.versions import versions
from hydra_tune.core.errors import HydraTuneError

SECRET = b"s" * 32
HELLO = {"name": "n0", "node": "id0", **versions()}


class Bomb:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("unpickled",)


def served(talk: Callable[[int], Awaitable[None]]) -> tuple[list[Any], list[str], dict[str, HydraTuneError]]:
    """Let `talk` talk to a listener; return the messages it received, the reasons why lines ended, the refusals."""
    messages: list[Any] = []
    ends: list[str] = []
    refusals: dict[str, HydraTuneError] = {}

    async def serve(hello: dict[str, Any], line: Line) -> None:
        async def handle(message: Any) -> None:
            messages.append(message)
            line.send(Leave("enough"))

        ends.append(await line.messages(handle))
        line.cut()

    async def run() -> None:
        async with Listener(SECRET, serve, refusals.__setitem__).open("127.0.0.1", 0) as port:
            await talk(port)
            for _ in range(100):
                if ends or refusals:
                    break
                await asyncio.sleep(0)

    asyncio.run(run())
    return messages, ends, refusals


async def greeted(port: int, **changes: Any) -> tuple[Line, dict[str, Any]]:
    line = await connect("127.0.0.1", port, SECRET)
    line.send_hello(HELLO | changes)
    return line, await line.hello()


async def until_closed(line: Line) -> None:
    async def ignore(message: Any) -> None:
        return

    await line.messages(ignore)
    line.cut()


def test_messages_pass_both_ways() -> None:
    heard: list[Any] = []

    async def talk(port: int) -> None:
        line, answer = await greeted(port)
        assert answer == {"refused": ""}

        async def handle(message: Any) -> None:
            heard.append(message)
            line.close()

        line.send(Beat(1.0))
        await line.messages(handle)

    messages, ends, _ = served(talk)
    assert (messages, heard) == ([Beat(1.0)], [Leave("enough")])
    assert ends == ["the connection was closed"]


def test_another_secret_is_refused_on_both_sides() -> None:
    async def talk(port: int) -> None:
        with pytest.raises((Refused, ConnectionError, asyncio.IncompleteReadError)):
            await connect("127.0.0.1", port, b"t" * 32)

    assert served(talk) == ([], [], {})


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", framing.GREETING + b"\0" * 64, b"\xff" * 4096])
def test_garbage_instead_of_a_greeting_is_dropped(garbage: bytes) -> None:
    async def talk(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(garbage)
        writer.write_eof()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    assert served(talk) == ([], [], {})


@pytest.mark.parametrize("how", ["wrong key", "repeated", "raw"])
def test_what_has_no_valid_code_is_not_unpickled(how: str, own_folder: Path) -> None:
    async def talk(port: int) -> None:
        line, _ = await greeted(port)
        bomb = pickle.dumps(Bomb())
        if how == "wrong key":
            line._writer.write(Sealer(b"x" * 32).seal(bomb))
        elif how == "raw":
            line._writer.write(bomb + b"\0" * 1000)
        else:
            frame = line._sealer.seal(pickle.dumps(Beat(1.0)))
            line._writer.write(frame + frame)
        await until_closed(line)

    messages, ends, _ = served(talk)
    assert len(ends) == 1
    assert "its line was closed" in ends[0]
    assert messages in ([], [Beat(1.0)] if how == "repeated" else [])
    assert not (own_folder / "unpickled").exists()


@pytest.mark.parametrize("what", ["python", "torch", "hydra-tune"])
def test_another_version_is_refused_by_name(what: str) -> None:
    async def talk(port: int) -> None:
        line, answer = await greeted(port, **{what: "0.0"})
        assert f"node n0 has {what} 0.0 instead of {versions()[what]}" in answer["refused"]
        await until_closed(line)

    _, ends, refusals = served(talk)
    assert list(refusals) == ["n0"]
    assert ends == []


def test_a_silent_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hydra_tune.cluster.line.BEAT_SECONDS", 0.01)

    async def talk(port: int) -> None:
        line, _ = await greeted(port)
        await line.silent_for(0.05)
        line.cut()

    served(talk)
