"""The study as an agent's attempts see it: calls and records go to the coordinator over the line."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hydra_tune.cluster.line import Line
from hydra_tune.cluster.messages import Answer, Ask
from hydra_tune.engine.unit import Failure, StepRecord, Unit, UnitResult

Reply = Callable[[Any, Failure | None], None]


class NodeStudy:
    """A `TrialStudy` for the attempts of one node."""

    def __init__(self, line: Line, on_checkpoint: Callable[[int], None]) -> None:
        """`on_checkpoint` gets the number of a trial that has written a checkpoint."""
        self._line = line
        self._on_checkpoint = on_checkpoint
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._replies: dict[int, Reply] = {}
        self.attempts: dict[int, str] = {}
        """Current attempt of each trial on this node."""
        self.stopped: set[int] = set()
        """Running trials that were asked to stop, or that another process has told."""

    async def suggest(self, number: int, attempt: str, name: str, choices: Sequence[str]) -> str:
        """Let the sampler choose one of `choices` for a trial, as a categorical parameter."""
        chosen: str = await self._ask(number, attempt, "suggest_choice", name, tuple(choices))
        return chosen

    async def epoch(self, number: int, epoch: int, metrics: dict[str, float]) -> bool:
        """Record an epoch's metrics; return True if the trial is to be pruned."""
        return bool(await self._ask(number, self.attempts[number], "epoch", epoch, metrics))

    def record_steps(self, number: int, attempt: str, device: str, steps: Sequence[StepRecord]) -> None:
        """Record steps of units that are not recorded one by one."""
        self.tell(number, attempt, "steps", device, tuple(steps))

    def record_checkpoint(self, number: int, step: int, size: int, seconds: float) -> None:
        """Record a checkpoint of `size` bytes that took `seconds` to write."""
        self.tell(number, self.attempts[number], "checkpoint", step, size, seconds)
        self._on_checkpoint(number)

    def record_spilled(self, sampled: float, host_bytes: int, disk_bytes: int) -> None:
        """Record the bytes in this node's spill store."""
        self.tell(None, "", "spilled", sampled, host_bytes, disk_bytes)

    def record_event(self, number: int | None, kind: str, message: str) -> None:
        """Record an event of a trial, or of the study."""
        self.tell(number, self.attempts.get(number, "") if number is not None else "", "event", kind, message)

    def unit(self, name: str, unit: Unit, *args: Any) -> None:
        """Tell of a unit, without what it computes."""
        self.tell(unit.trial, unit.attempt, name, replace(unit, work=_nothing, args=()), *args)

    def unit_ended(self, unit: Unit, result: UnitResult) -> None:
        """Tell of a unit's end, without its value."""
        self.unit("unit_ended", unit, replace(result, value=None))

    def answer(self, unit: Unit, name: str, args: tuple[Any, ...], reply: Reply | None) -> None:
        """Pass on a call of user code; `reply` gets the answer."""
        if reply is None:
            self.tell(unit.trial, unit.attempt, "call", name, args)
            return
        number = next(self._numbers)
        self._replies[number] = reply
        self._line.send(Ask(number, unit.trial, unit.attempt, "call", (name, args)))

    def tell(self, number: int | None, attempt: str, name: str, *args: Any) -> None:
        """Tell the coordinator something that needs no answer."""
        self._line.send(Ask(None, number, attempt, name, args))

    def answered(self, answer: Answer) -> None:
        """Hand an answer to who has asked."""
        reply = self._replies.pop(answer.ask, None)
        if reply is not None:
            reply(answer.value, answer.failure)
        future = self._asked.pop(answer.ask, None)
        if future is not None and not future.done():
            if answer.error is not None:
                future.set_exception(answer.error)
            else:
                future.set_result(answer.value)

    async def _ask(self, number: int, attempt: str, name: str, *args: Any) -> Any:
        asked = next(self._numbers)
        self._asked[asked] = future = asyncio.get_running_loop().create_future()
        self._line.send(Ask(asked, number, attempt, name, args))
        return await future


def _nothing() -> None:
    """Stand in for a unit's work, which stays on its node."""
