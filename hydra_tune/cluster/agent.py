"""The agent of one node: owns its devices and runs the attempts that the coordinator sends.

Started as `python -m hydra_tune.cluster.agent`; its first line of input is an `Order` as JSON, as a command line would
show the secret. It ends, with its workers and directories, when the coordinator says so, when the line breaks or is
silent, and when its input ends, which means that whoever started it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
import tempfile
from typing import Any

from hydra_tune.cluster.framing import Refused
from hydra_tune.cluster.line import AGENT_SILENCE, Line, connect
from hydra_tune.cluster.messages import Begin, Leave
from hydra_tune.cluster.node_search import NodeSearch
from hydra_tune.cluster.order import Order
from hydra_tune.cluster.versions import versions
from hydra_tune.core.errors import HydraTuneError

logger = logging.getLogger(__name__)

ENDED, UNREACHABLE, REFUSED = 0, 3, 4
"""Exit codes: told to end or cut off; the coordinator's port cannot be reached; refused by the coordinator."""


async def serve(order: Order) -> int:
    """Serve the coordinator until the end; return the exit code."""
    try:
        line = await connect(order.host, order.port, bytes.fromhex(order.secret))
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        _say(f"node {order.name} cannot reach the coordinator at {order.host}:{order.port} ({error or 'timeout'})")
        return UNREACHABLE
    except Refused as error:
        _say(str(error))
        return REFUSED
    try:
        line.send_hello({"node": order.node, "name": order.name, "host": socket.gethostname(), "pid": os.getpid(),
                         "cpus": order.cpus, "gpus": order.gpus, **versions()})  # fmt: skip
        async with asyncio.timeout(AGENT_SILENCE):
            answer = await line.hello()
        if answer.get("refused"):
            _say(str(answer["refused"]))
            return REFUSED
        await _search(line, order)
    except (OSError, TimeoutError, Refused) as error:
        _say(f"the line to the coordinator has ended ({error})")
    finally:
        line.cut()
    return ENDED


async def _search(line: Line, order: Order) -> None:
    """Take part in the search until the line, the lease or the input ends."""
    begun: asyncio.Future[Begin] = asyncio.get_running_loop().create_future()
    left = asyncio.Event()
    node: NodeSearch | None = None

    async def handle(message: Any) -> None:
        if isinstance(message, Begin):
            begun.set_result(message)
        elif isinstance(message, Leave):
            left.set()
        elif node is not None:
            await node.handle(message)

    reading, silence = line.messages(handle), line.silent_for(AGENT_SILENCE)
    ends: list[asyncio.Future[Any]] = [
        asyncio.create_task(end) for end in (reading, silence, left.wait(), _input_ended())
    ]
    try:
        await asyncio.wait([begun, *ends], return_when=asyncio.FIRST_COMPLETED)
        if begun.done():
            _enter(begun.result().cwd)
            node = NodeSearch(begun.result(), line, order)
            working = asyncio.create_task(node.run())
            await asyncio.wait([working, *ends], return_when=asyncio.FIRST_COMPLETED)
            working.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await working
    finally:
        for task in ends:
            task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


def _enter(cwd: str) -> None:
    """Change to the coordinator's current folder if this node has it, for relative paths of the user's data."""
    try:
        os.chdir(cwd)
    except OSError:
        os.chdir(tempfile.gettempdir())


async def _input_ended() -> None:
    """Return when the input ends: the process that started this one is gone."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(4096):
        continue


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Read the order and serve; return the exit code."""
    order = Order.read(sys.stdin.readline())
    try:
        return asyncio.run(serve(order))
    except HydraTuneError as error:
        _say(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
