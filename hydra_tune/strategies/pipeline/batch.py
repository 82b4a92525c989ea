"""One batch of a pipelined trial: a task per stage and micro-batch awaits its predecessors, then runs a unit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hydra_tune.engine.remote import remote
from hydra_tune.strategies.concurrent_units import ConcurrentUnits
from hydra_tune.strategies.pipeline.schedule import IN_TURN, KINDS
from hydra_tune.strategies.pipeline.staged import Forwarded, Random, Sent
from hydra_tune.strategies.pipeline.stages import Stage

if TYPE_CHECKING:
    from hydra_tune.strategies.pipeline import units as units
    from hydra_tune.strategies.pipeline.strategy import InStages
else:
    units = remote("hydra_tune.strategies.pipeline.units")


class Batch:
    """The tasks of one batch, one for each stage and micro-batch."""

    def __init__(
        self, trial: InStages, fetched: Sequence[Sent], weights: Sequence[float], remaining: float | None
    ) -> None:
        self.trial = trial
        self.stages = trial.staged.stages
        self.fetched = fetched
        self.weights = weights
        self.remaining = remaining
        self.alone = trial.run.engine.load(trial.run.attempt).others == 0
        """True if no other trial would use the time in which a device waits."""
        self.loss = 0.0
        self.random_after: Random = None
        self._forward: dict[tuple[int, int], asyncio.Task[Forwarded]] = {}
        self._backward: dict[tuple[int, int], asyncio.Task[Sent]] = {}

    async def run(self) -> None:
        async with ConcurrentUnits() as together:
            for lane in range(len(self.weights)):
                for stage in self.stages:
                    self._forward[stage.index, lane] = together.start(self._go_forward(stage, lane))
                for stage in reversed(self.stages):
                    if not stage.loss and self.trial.users[stage.index]:
                        self._backward[stage.index, lane] = together.start(self._go_backward(stage, lane))
                    if self._in_halves(stage, lane):
                        together.start(self._go_weights(stage, lane))
            together.start(self._fetch_ahead())

    async def _fetch_ahead(self) -> None:
        """Make the next batch once the first device has done its forwards and waits for gradients."""
        epoch, position = self.trial.position["epoch"], self.trial.position["batch"] + 1
        if self.trial.staged.draws or position >= self.trial.staged.data[2]:
            return  # a model that draws random numbers must draw before the next batch does
        for stage in self.stages:
            if stage.device == 0:
                await self._forward[stage.index, len(self.weights) - 1]
        await self.trial.on(0, "fetch", units.fetch_ahead, epoch, position, recorded=False, rank=IN_TURN)

    async def _go_forward(self, stage: Stage, lane: int) -> Forwarded:
        allowed = lane - self.trial.limits[stage.index]
        if allowed >= 0 and not stage.loss and self.trial.users[stage.index]:
            await self._backward[stage.index, allowed]
        elif allowed >= 0 and stage.loss and not self._by_itself(stage):
            # With the loss, forward and backward are one unit, which keeps nothing. If its device has no other stage,
            # the unit may queue there, so that there is no gap before it.
            await self._forward[stage.index, allowed]
        before = {other: await self._forward[other, lane] for other in stage.before}
        arrived = self.trial.arriving(stage, self.fetched[lane], [each.sent for each in before.values()])
        random: Random = None
        if self.trial.staged.draws:
            random = self._first_random(lane) if stage.index == 0 else before[stage.index - 1].random
        await self.trial.stepped(stage.device)
        result = await self.trial.on(
            stage.device, "forward", units.forward, stage.index, lane, arrived, self.weights[lane], random,
            self._in_halves(stage, lane), **self._options("forward", lane),
        )  # fmt: skip
        self.trial.took("forward", stage, result)
        done: Forwarded = result.value
        if stage.loss:
            self.loss += done.loss * self.weights[lane]
        if stage.index == len(self.stages) - 1:
            self.random_after = done.random
        return done

    async def _go_backward(self, stage: Stage, lane: int) -> Sent:
        arrived = []
        for user in self.trial.users[stage.index]:
            if self.stages[user].loss:
                sent = (await self._forward[user, lane]).sent
            else:
                sent = await self._backward[user, lane]
            arrived.append((user, {value: tree for value, tree in sent.items() if value in stage.gives}))
        result = await self.trial.on(
            stage.device, "backward", units.backward, stage.index, lane, arrived, **self._options("backward", lane)
        )
        self.trial.took("backward", stage, result)
        sent_on: Sent = result.value
        return sent_on

    def _options(self, kind: str, lane: int) -> dict[str, Any]:
        """Return a unit's scheduler options; among several trials, arrival order goes before micro-batch order."""
        rank = (KINDS.index(kind), lane if self.alone else 0)
        return {"remaining": self.remaining, "recorded": False, "rank": rank}

    def _by_itself(self, stage: Stage) -> bool:
        return sum(other.device == stage.device for other in self.stages) == 1

    def _in_halves(self, stage: Stage, lane: int) -> bool:
        """True if a stage's weight gradients are deferred: in the last micro-batch, if another device waits.

        Not if other trials fill the gap, since two halves take a little longer than the whole.
        """
        used = stage.loss or self.trial.users[stage.index]
        return self.alone and bool(stage.later and used) and lane == len(self.weights) - 1

    async def _go_weights(self, stage: Stage, lane: int) -> None:
        await (self._forward if stage.loss else self._backward)[stage.index, lane]
        result = await self.trial.on(
            stage.device, "weights", units.weights, stage.index, lane, **self._options("weights", lane)
        )
        self.trial.took("weights", stage, result)

    def _first_random(self, lane: int) -> Random:
        """Return the random state of a micro-batch: the batch's if it is the only one, else a seed of its own."""
        if len(self.weights) == 1:
            return self.trial.random
        at = self.trial.position
        return hash((self.trial.run.seed, at["epoch"], at["batch"], lane)) % 2**31
