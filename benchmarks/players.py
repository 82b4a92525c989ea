"""Systems that take turns, each in its own processes, which sleep until they are told to make some steps.

The load of a shared machine changes from minute to minute. Runs of a minute, one after another, meet different
conditions; turns of one or a few steps meet the same.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from hydra_tune.engine.launch import MEMORY_SETTINGS


class Player:
    """A system in its own processes; the first receives the turns and reports their times."""

    def __init__(self, module: str, *commands: Sequence[str]) -> None:
        environment = {**os.environ, **MEMORY_SETTINGS, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, *command], env=environment, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, text=True,
            )
            for command in commands
        ]  # fmt: skip

    def turn(self, trials: Sequence[int] = (0,), steps: int = 1) -> float:
        """Run `steps` steps of each of these trials at once; return the seconds."""
        self.begin(trials, steps)
        return self.end()

    def begin(self, trials: Sequence[int] = (0,), steps: int = 1) -> None:
        """Begin a turn without waiting for it."""
        told = self._processes[0].stdin
        assert told is not None
        print(json.dumps([list(trials), steps]), file=told, flush=True)

    def end(self) -> float:
        """Wait for the end of the turn and return its seconds."""
        said = self._processes[0].stdout
        assert said is not None
        line = said.readline()
        if not line:
            raise RuntimeError(f"{' '.join(map(str, self._processes[0].args))} ended in the middle of a turn")
        return float(line)

    def finish(self) -> None:
        """Let the system run to its end without turns."""
        for process in self._processes:
            process.communicate()
            assert process.returncode == 0


def wait_for_turn() -> None:
    """Sleep until the next turn of one step, in a player of one trial without a `Gate`."""
    sys.stdin.readline()


class Gate:
    """Makes every step of a searching player's trials wait for a turn.

    When nobody gives turns any more, the gate is open. A trial with more steps than turns does its final work outside
    all turns.
    """

    def __init__(self) -> None:
        self._open = False
        self._allowed: dict[int, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(0))
        self._made = asyncio.Semaphore(0)
        self._turns: asyncio.Task[None] | None = None

    def guard(self, kind: type[Any], method: str) -> None:
        """Make this method, which runs one step of a strategy's trial, wait for its turn."""
        plain: Callable[..., Awaitable[Any]] = getattr(kind, method)

        async def in_turn(trial: Any, *given: Any) -> Any:
            if self._turns is None:
                self._turns = asyncio.create_task(self._take_turns())
            if not self._open:
                await self._allowed[trial.run.number].acquire()
            try:
                return await plain(trial, *given)
            finally:
                self._made.release()

        setattr(kind, method, in_turn)

    async def _take_turns(self) -> None:
        while line := await asyncio.to_thread(sys.stdin.readline):
            trials, steps = json.loads(line)
            clock = time.perf_counter()
            for trial in trials:
                for _ in range(steps):
                    self._allowed[trial].release()
            for _ in range(steps * len(trials)):
                await self._made.acquire()
            print(time.perf_counter() - clock, flush=True)
        self._open = True
        for waiting in self._allowed.values():
            waiting.release()
