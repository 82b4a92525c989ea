"""The order in which stages process micro-batches, and the predicted time of a step. Pure, on a virtual clock.

Two orders. GPipe (arXiv 1811.06965) runs all forwards before the first backward. 1F1B (PipeDream, arXiv 1806.03377)
admits only as many micro-batches as keep the later stages busy, so fewer activations are kept; it takes as long. The
stage with the loss always runs its backward at once.

A device prefers forwards: later devices wait for them, and their number is limited anyway. First come, first served
takes up to a tenth longer where a device has several stages.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hydra_tune.strategies.pipeline.stages import Stage

ORDERS = ("1f1b", "gpipe")
KINDS = ("forward", "backward", "weights")
"""Units of a stage for a micro-batch, in order of priority; `weights` is split off `backward` where another device
waits for the rest."""

IN_TURN = (KINDS.index("backward"), 0)
"""The rank of units outside a step, such as evaluation: they take turns with other trials' steps."""


def bounds(rows: int, count: int) -> list[tuple[int, int]]:
    """Return first row and end row of each of `count` micro-batches of nearly equal size."""
    small, more = divmod(rows, count)
    ends = [index * small + min(index, more) for index in range(count + 1)]
    return list(itertools.pairwise(ends))


def in_flight(stages: Sequence[Stage], order: str, microbatches: int) -> list[int]:
    """Return, per stage, the maximum number of micro-batches between its forward and its backward.

    In 1F1B: one for each device from here to the loss, plus one in transit.
    """
    if order == "gpipe":
        return [microbatches] * len(stages)
    users = users_of(stages)
    depth = [1] * len(stages)
    for stage in reversed(stages):
        if not stage.loss:
            hops = [depth[user] + (stages[user].device != stage.device) for user in users[stage.index]]
            depth[stage.index] = max(hops, default=1)
    limits = []
    for stage in stages:
        if stage.loss:
            limits.append(1)
        elif not users[stage.index]:
            limits.append(microbatches)  # no stage uses its values, so it has no backward to wait for
        else:
            limits.append(min(microbatches, depth[stage.index] + 1))
    return limits


def users_of(stages: Sequence[Stage]) -> list[list[int]]:
    """Return, per stage, the stages that use its values and send gradients back: those on a path to the loss."""
    users: list[list[int]] = [[] for _ in stages]
    for stage in reversed(stages):
        if not stage.loss and not users[stage.index]:
            continue  # no stage uses its values
        for other in stage.before:
            if set(stage.takes).intersection(stages[other].gives):
                users[other].insert(0, stage.index)
    return users


@dataclass(frozen=True)
class Prediction:
    """The predicted seconds of a step, and the seconds that each device computes in it."""

    seconds: float
    busy: tuple[float, ...]

    def shared_seconds(self, trials: int) -> float:
        """Return the seconds for one step of each of so many trials at once: they fill gaps, but not a busy device."""
        return max(self.seconds, trials * max(self.busy))


@dataclass
class _Device:
    free: float = 0.0
    busy: float = 0.0
    ready: list[tuple[int, int, float, int, tuple[str, int, int]]] = field(default_factory=list)
    """Per task: kind, micro-batch, ready time, a tie-breaking count, and the task."""


def predict(
    stages: Sequence[Stage], devices: int, microbatches: int, order: str, *,
    way: Callable[[Stage, Stage], float], step_seconds: Sequence[float], unit_seconds: float = 0.0,
) -> Prediction:  # fmt: skip
    """Simulate a step.

    `way` returns the seconds to pass values from one stage to another, `step_seconds` is each device's optimizer step,
    `unit_seconds` a device's overhead per unit.
    """
    return _Play(stages, devices, microbatches, order, way, step_seconds, unit_seconds).run()


class _Play:
    """A simulated step; a device takes forwards first, and earlier micro-batches first."""

    def __init__(
        self, stages: Sequence[Stage], devices: int, microbatches: int, order: str,
        way: Callable[[Stage, Stage], float], step_seconds: Sequence[float], unit_seconds: float,
    ) -> None:  # fmt: skip
        self.stages = stages
        self.microbatches = microbatches
        self.way = way
        self.step_seconds = step_seconds
        self.unit_seconds = unit_seconds
        self.users = users_of(stages)
        self.limit = in_flight(stages, order, microbatches)
        self.devices = [_Device() for _ in range(devices)]
        self.done: dict[tuple[str, int, int], float] = {}
        self.begun: set[tuple[str, int, int]] = set()
        self.count = itertools.count()

    def run(self) -> Prediction:
        events: list[tuple[float, int, int]] = []
        for stage in self.stages:
            for number in range(self.microbatches):
                self._offer(("forward", stage.index, number))
        self._start(events, 0.0)
        while events:
            now, _, device = heapq.heappop(events)
            self._start(events, now, device)
        ends = [
            device.free + (self.step_seconds[index] if device.busy else 0.0)
            for index, device in enumerate(self.devices)
        ]
        return Prediction(max(ends), tuple(device.busy for device in self.devices))

    def _start(self, events: list[tuple[float, int, int]], now: float, only: int | None = None) -> None:
        """Let free devices take ready tasks; finished tasks offer those that wait for them."""
        for index, device in enumerate(self.devices):
            if (only is not None and index != only) or device.free > now or not device.ready:
                continue
            there = [waiting for waiting in device.ready if waiting[2] <= now]
            if not there:
                heapq.heappush(events, (min(waiting[2] for waiting in device.ready), next(self.count), index))
                continue
            device.ready.remove(min(there))
            task = min(there)[-1]
            seconds = self._seconds(task)
            device.free, device.busy = now + seconds, device.busy + seconds
            self.done[task] = device.free - self._afterwards(task)
            heapq.heappush(events, (device.free, next(self.count), index))
            for other, ready_at in self._offered_by(task):
                self._offer(other)
                heapq.heappush(events, (max(ready_at, self.done[task]), next(self.count), self.stages[other[1]].device))

    def _seconds(self, task: tuple[str, int, int]) -> float:
        stage = self.stages[task[1]]
        if task[0] == "backward":
            return self.unit_seconds + stage.backward_seconds
        return self.unit_seconds + stage.forward_seconds + (stage.backward_seconds if stage.loss else 0.0)

    def _afterwards(self, task: tuple[str, int, int]) -> float:
        """Return the seconds a device continues with a task after its result was sent: see `pipeline.halves`."""
        kind, index, number = task
        stage = self.stages[index]
        return stage.later_seconds if number == self.microbatches - 1 and (stage.loss or kind == "backward") else 0.0

    def _offered_by(self, task: tuple[str, int, int]) -> list[tuple[tuple[str, int, int], float]]:
        """Return the tasks that a finished task may have made ready."""
        kind, index, number = task
        stage = self.stages[index]
        offered: list[tuple[str, int, int]] = []
        if kind == "forward":
            offered += [("forward", later.index, number) for later in self.stages if index in later.before]
        if kind == "backward" or stage.loss:
            offered += [("backward", maker, number) for maker in stage.before if index in self.users[maker]]
            offered.append(("forward", index, number + self.limit[index]))
        found = []
        for other in offered:
            ready = self._ready_at(other)
            if ready is not None:
                found.append((other, ready))
        return found

    def _offer(self, task: tuple[str, int, int]) -> None:
        ready = self._ready_at(task)
        if ready is not None and task not in self.begun:
            self.begun.add(task)
            waiting = (KINDS.index(task[0]), task[2], ready, next(self.count), task)
            self.devices[self.stages[task[1]].device].ready.append(waiting)

    def _ready_at(self, task: tuple[str, int, int]) -> float | None:
        """Return the time when all inputs of a task are ready; None while any is not yet known."""
        kind, index, number = task
        stage = self.stages[index]
        if number >= self.microbatches:
            return None
        waits: list[tuple[tuple[str, int, int], float]] = []
        if kind == "forward":
            waits += [(("forward", other, number), self.way(self.stages[other], stage)) for other in stage.before]
            if number >= self.limit[index]:
                waits.append((("forward" if stage.loss else "backward", index, number - self.limit[index]), 0.0))
        else:
            for user in self.users[index]:
                ended = "forward" if self.stages[user].loss else "backward"
                waits.append(((ended, user, number), self.way(self.stages[user], stage)))
        if any(other not in self.done for other, _ in waits):
            return None
        return max((self.done[other] + seconds for other, seconds in waits), default=0.0)
