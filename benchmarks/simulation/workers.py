"""Simulated worker processes: they take messages in order, run units, and die, hang or are slow as the seed says."""

from __future__ import annotations

import asyncio
import io
import itertools
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from benchmarks.simulation.clock import VirtualLoop
from benchmarks.simulation.training import Files, Pruned, Shape, Units, Work
from hydra_tune.core.errors import HydraTuneError
from hydra_tune.engine import messages
from hydra_tune.engine.inbox import Inbox
from hydra_tune.engine.remote import find_function
from hydra_tune.engine.unit import Failure
from hydra_tune.engine.worker_processes import Process

MOST_BUILDERS = 2


@dataclass(frozen=True)
class Faults:
    """Probabilities of faults, and latencies in seconds."""

    dies: float = 0.0
    """Of a unit: its worker dies before, while or just after it runs."""
    hangs: float = 0.0
    """Of a unit: its worker shows no more sign of life."""
    drops: float = 0.0
    """Of a unit: the message of its end is lost, as the worker stopped while it sent it."""
    stillborn: float = 0.0
    """Of a worker: it dies before it is ready."""
    latency: float = 0.001
    """Mean of a message's latency; messages of one worker keep their order, those of several do not."""
    seconds: float = 0.3
    """Longest unit."""


class NoFaults(Faults):
    """Nothing goes wrong."""


@dataclass
class World:
    """State that the workers of one search share."""

    loop: VirtualLoop
    chance: Random
    faults: Faults
    shape: Shape
    spilled: dict[str, Files] = field(default_factory=dict)
    processes: list[SimulatedProcess] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    pids: itertools.count[int] = field(default_factory=lambda: itertools.count(10_000))
    events: int = 0
    """Faults that happened."""

    def latency(self) -> float:
        return self.chance.expovariate(1 / self.faults.latency)

    def happens(self, probability: float) -> bool:
        happened = self.chance.random() < probability
        self.events += happened
        return happened


class SimulatedProcesses:
    """A source of simulated workers, in place of `LocalProcesses`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._closing = False

    def make(
        self, setup: messages.Setup, on_message: Callable[[Any], None], on_line: Callable[[str], None]
    ) -> Process:  # fmt: skip
        alive = [each for each in self._world.processes if each.setup.device == setup.device and each.alive]
        if len(alive) >= (MOST_BUILDERS if setup.device == "builder" else 1):
            self._world.wrong.append(f"{len(alive) + 1} processes of {setup.device} at a time")
        process = SimulatedProcess(self._world, setup, on_message)
        self._world.processes.append(process)
        return process

    def warm(self, modules: Sequence[str]) -> None:
        """Nothing is imported."""

    def abandon(self) -> None:
        self._closing = True

    def close(self) -> None:
        if any(process.alive for process in self._world.processes):
            self._world.wrong.append("a worker was left behind")


class SimulatedProcess:
    """Both sides of a worker process; stands for `WorkerProcess` and `Worker`."""

    def __init__(self, world: World, setup: messages.Setup, on_message: Callable[[Any], None]) -> None:
        self.setup = setup
        self.tail: deque[str] = deque()
        self.alive = True
        self.pid = next(world.pids)
        self._world = world
        self._loop = world.loop
        self._on_message = on_message
        self._units = Units(world.shape, world.chance, world.spilled)
        self._inbox = Inbox()
        self._news = asyncio.Event()
        self._withdrawn: set[int] = set()
        self._calls = itertools.count()
        self._replies: dict[int, asyncio.Future[messages.Reply]] = {}
        self._arrives = self._departs = 0.0
        """Latest times of messages on their way, which keep their order."""
        self._closed = asyncio.Event()
        self._because = ""
        self._task: asyncio.Task[None] | None = None

    # The coordinator's side

    def start(self) -> None:
        self._loop.call_later(0.05 + self._world.latency(), self._begin)

    def send(self, message: object) -> None:
        if self.alive:
            pickle.dumps(message)
            self._arrives = max(self._arrives, self._loop.time() + self._world.latency())
            self._loop.call_at(self._arrives, self._arrive, message)

    def kill(self, because: str = "") -> None:
        self._because = self._because or because
        self._die()

    async def closed(self) -> None:
        await self._closed.wait()

    async def dump_stacks(self) -> str:
        await asyncio.sleep(1.0)
        return "stacks"

    async def reap(self) -> str:
        await asyncio.sleep(self._world.latency())
        return f"was killed: {self._because}" if self._because else "was killed (signal 9)"

    # The worker's side

    def _begin(self) -> None:
        if not self.alive:
            return
        if self._world.happens(self._world.faults.stillborn):
            self._die()
            return
        self._say(messages.Ready(self.pid))
        self._task = self._loop.create_task(self._run_units())

    def _die(self) -> None:
        if self.alive:
            self.alive = False
            if self._task is not None:
                self._task.cancel()
            # Messages that were sent arrive before the end is noticed.
            end = max(self._departs, self._loop.time() + self._world.latency())
            self._loop.call_at(end + 1e-4, self._closed.set)

    def _say(self, message: object) -> None:
        self._departs = max(self._departs, self._loop.time() + self._world.latency())
        self._loop.call_at(self._departs, self._on_message, message)

    def _arrive(self, message: object) -> None:
        match message:
            case messages.Reply(call=call):
                if not (waiting := self._replies.pop(call)).done():
                    waiting.set_result(message)
            case messages.Withdraw(unit):
                self._withdrawn.add(unit)
            case messages.RunUnit() | messages.Drop():
                self._inbox.put(message)
                self._news.set()

    async def _run_units(self) -> None:
        while True:
            while not self._inbox._waiting:
                self._news.clear()
                await self._news.wait()
            message = self._inbox.get()
            if isinstance(message, messages.Drop):
                self._units.resident.pop(message.attempt, None)
            elif message.unit in self._withdrawn:
                self._say(messages.Withdrawn(message.unit))
            else:
                await self._run(message)

    async def _run(self, run: messages.RunUnit) -> None:
        faults, world = self._world.faults, self._world
        dies = world.chance.choice(("before", "while", "after")) if world.happens(faults.dies) else ""
        if dies == "before":
            self._die()
        if world.happens(faults.hangs) or not self.alive:
            await asyncio.Event().wait()
        self._say(messages.Started(run.unit))
        began, value, failure = self._loop.time(), None, None
        await asyncio.sleep(world.chance.uniform(0, faults.seconds))
        if dies == "while":
            self._die()
            await asyncio.sleep(0)
        try:
            value = await self._result(run)
        except Pruned:
            failure = Failure("PrunedByUser", "", "", "PRUNED", ours=True)
        except HydraTuneError as error:  # a call of a unit that was given up is refused
            failure = Failure.of(error)
        except Exception as error:
            world.wrong.append(f"{type(error).__name__}: {error} in a unit of {run.attempt}")
            failure = Failure.of(error)
        if world.happens(faults.drops):
            await asyncio.Event().wait()
        if dies == "after" and world.chance.random() < 0.5:
            self._die()  # before the answer is sent
            await asyncio.sleep(0)
        self._say(messages.UnitDone(run.unit, value, failure, began, self._loop.time() - began, None))
        if dies == "after":
            self._die()
            await asyncio.sleep(0)

    async def _result(self, run: messages.RunUnit) -> Any:
        """Return the unit's value; calls of its work go to the coordinator."""
        work: Work = _unpickled(run.call, self._units)
        answer: Any = None
        try:
            while True:
                name, args, waits = work.send(answer)
                answer = await self._call(run.unit, name, args) if waits else self._tell(run.unit, name, args)
        except StopIteration as ended:
            return ended.value

    def _tell(self, unit: int, name: str, args: tuple[Any, ...]) -> None:
        self._say(messages.Call(unit, None, name, args))

    async def _call(self, unit: int, name: str, args: tuple[Any, ...]) -> Any:
        call = next(self._calls)
        waiting = self._replies[call] = self._loop.create_future()
        self._say(messages.Call(unit, call, name, args))
        reply = await waiting
        if reply.failure is not None:
            raise HydraTuneError(reply.failure.message)
        return reply.value


class _Unpickler(pickle.Unpickler):
    """Finds the simulated work instead of the real one, which needs torch."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (find_function.__module__, find_function.__name__):
            return lambda module, name: (module, name)
        if module == "hydra_tune.training.builds" and name[0].islower():
            return (module, name)
        return super().find_class(module, name)


def _unpickled(call: bytes, units: Units) -> Work:
    (module, name), args = _Unpickler(io.BytesIO(call)).load()
    return units.find(module, name)(*args)
