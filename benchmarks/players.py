"""Systems that take turns: each in processes of its own, which sleep until they are told to make some steps.

What neighbours do to a shared machine changes from one minute to the next. Runs of a minute, one after another, meet
different machines; turns of a step, or of a few, meet the same one.
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

from hydra_tune.engine.process import MEMORY_SETTINGS


class Player:
    """A system in processes of its own; the first of them is told what to do, and says how long that took."""

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
        """The seconds that so many steps of each of these trials take, at once."""
        self.begin(trials, steps)
        return self.end()

    def begin(self, trials: Sequence[int] = (0,), steps: int = 1) -> None:
        """Let a turn begin, beside whatever else runs."""
        told = self._processes[0].stdin
        assert told is not None
        print(json.dumps([list(trials), steps]), file=told, flush=True)

    def end(self) -> float:
        """Wait for the end of the turn."""
        said = self._processes[0].stdout
        assert said is not None
        line = said.readline()
        if not line:
            raise RuntimeError(f"{' '.join(map(str, self._processes[0].args))} ended in the middle of a turn")
        return float(line)

    def finish(self) -> None:
        """Let it go on without turns, to its end."""
        for process in self._processes:
            process.communicate()
            assert process.returncode == 0


def wait_for_turn() -> None:
    """In a player of one trial without a `Gate`: sleep until the next turn, which is one step."""
    sys.stdin.readline()


class Gate:
    """In a player that searches: every step of its trials waits here until the trial has a turn.

    When nobody is left to give turns the gate is open. What a trial does at its end is in nobody's turn if it has more
    steps than turns.
    """

    def __init__(self) -> None:
        self._open = False
        self._allowed: dict[int, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(0))
        self._made = asyncio.Semaphore(0)
        self._turns: asyncio.Task[None] | None = None

    def guard(self, kind: type[Any], method: str) -> None:
        """Let a strategy's trials make their steps, which this method makes, in turns only."""
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
