"""The contract between the search and a strategy.

A strategy is straight-line async code that awaits units. It does not choose devices. A unit that fails raises where it
is awaited: a strategy that can go on from there may, else the search decides whether the trial is tried again. Being
pruned or interrupted raises too, so that a strategy has nothing to clean up: when its coroutine ends, what it left on
devices is dropped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hydra_tune.builds import Blueprint
from hydra_tune.engine.engine import Engine
from hydra_tune.engine.unit import Memory, Role, StepRecord, Unit, UnitResult
from hydra_tune.training import Progress


class Pruned(Exception):
    """Raised by `report`: the pruner has ended the trial."""


class Reconsidered(Exception):
    """Raised between units, after a checkpoint: another strategy goes on with the trial."""


class Interrupted(Exception):
    """Raised by `stop_here`: the search ends, and the trial goes on when it is resumed."""


def never(_progress: Progress) -> bool:
    """Nobody reconsiders."""
    return False


@dataclass(frozen=True)
class Candidacy:
    """Where a built candidate waits: in the worker that built it, or packed for any device."""

    worker: int | None = None
    parcel: bytes | None = None
    held: bool = False
    """Whether that worker is the builder."""


@dataclass
class TrialRun(ABC):
    """One attempt at one trial, as its strategy sees it."""

    number: int
    seed: int
    attempt: str
    blueprint: Blueprint
    candidacy: Candidacy
    metric: str
    maximize: bool
    weights: Path
    """Where the trained weights go."""
    checkpoints: Path
    """Where checkpoints go; those of an earlier attempt are there."""
    profiles: Path
    """Where the measured costs of models are kept, for all trials and runs."""
    engine: Engine
    at_once: int
    """How many trials may be on the devices at the same time."""
    memory: Memory | None = None
    """What the trial takes of a device, where it was planned."""
    remaining_at_first: float | None = None
    """Expected seconds of training, before anything is measured."""
    reconsider: Callable[[Progress], bool] = never
    """Whether another strategy is to go on with the trial from here; asked between units."""

    async def unit(
        self,
        kind: str,
        work: Callable[..., Any],
        *args: Any,
        role: Role = Role.DEVICE,
        worker: int | None = None,
        remaining: float | None = None,
        recorded: bool = True,
        rank: tuple[int, int] | None = None,
    ) -> UnitResult:
        """Await one unit of this trial; one of many short ones is not `recorded` by itself, but with `worked`."""
        result = await self.engine.run(
            Unit(
                trial=self.number, attempt=self.attempt, kind=kind, work=work, args=args, role=role,
                worker=worker, remaining=self.remaining_at_first if remaining is None else remaining,
                deadline=self.deadline(kind), recorded=recorded, memory=self.memory if role is Role.DEVICE else None,
                rank=rank,
            )
        )  # fmt: skip
        self.measured(kind, result.seconds)
        return result

    async def gang(
        self,
        kind: str,
        work: Callable[..., Any],
        members: Sequence[tuple[Any, ...]],
        *,
        workers: Sequence[int | None],
        remaining: float | None = None,
    ) -> list[UnitResult]:
        """Await a unit on several devices at the same time, as ranks of one torch.distributed group.

        `members` has the arguments of each, `workers` where each has to run, if that matters. All fail together.
        """
        units = [
            Unit(
                trial=self.number, attempt=self.attempt, kind=kind, work=work, args=args, worker=worker,
                remaining=remaining, deadline=self.deadline(kind), memory=self.memory,
            )
            for args, worker in zip(members, workers, strict=True)
        ]  # fmt: skip
        results = await self.engine.run_gang(units)
        self.measured(kind, max(result.seconds for result in results))
        return results

    def room(self) -> tuple[int, ...]:
        """What the trial may take of each device, if all that are there at the same time get an equal part."""
        devices = self.engine.devices
        shares = (device.memory // self.at_once for device in devices)
        return tuple(min(pair) for pair in zip(shares, self.engine.room(self.attempt), strict=True))

    def release_builder(self) -> None:
        """The candidate has arrived on its device: the builder need not hold it any longer."""
        self.engine.drop(self.attempt, Role.BUILDER)

    def better(self, value: float, than: float | None) -> bool:
        """Whether `value` beats the best so far, in the direction of the search."""
        if than is None:
            return True
        return value > than if self.maximize else value < than

    @abstractmethod
    def deadline(self, kind: str) -> float | None:
        """How long a unit of this kind may show no sign of life."""

    @abstractmethod
    def measured(self, kind: str, seconds: float) -> None:
        """A unit of this kind took so long."""

    @abstractmethod
    def progress(self, progress: Progress) -> None:
        """How far training is, for the display."""

    @abstractmethod
    def remaining(self, progress: Progress) -> float | None:
        """Expected seconds of training left, as the scheduler counts them; None where nothing was measured."""

    @abstractmethod
    def planned(self, strategy: str, shards: int, plan: dict[str, Any] | None = None) -> None:
        """The trial is trained by this strategy, in so many shards or stages; `plan` says which, as plain data."""

    @abstractmethod
    def worked(self, device: str, steps: Sequence[StepRecord]) -> None:
        """Units that were not recorded one by one, summed up."""

    @abstractmethod
    def spilled(self, read: int, written: int) -> None:
        """So many bytes came from the spill store and went there."""

    @abstractmethod
    def communicated(self, size: int) -> None:
        """So many bytes of state or gradients went between the parts of a trial that train apart."""

    @abstractmethod
    def note(self, kind: str, message: str) -> None:
        """Something worth knowing happened to the trial."""

    @abstractmethod
    async def report(self, epoch: int, metrics: dict[str, float]) -> None:
        """All metrics of an epoch, at its end; raises Pruned when the trial is to end."""

    @abstractmethod
    async def restored(self, history: list[dict[str, float]], notes: tuple[str, ...]) -> None:
        """Training goes on from a checkpoint: the metrics of the epochs before it, and what was amiss with others."""

    @abstractmethod
    def checkpoint_due(self, *, waits: bool = False) -> bool:
        """Whether it is time for a checkpoint: now and then, and before the search stops.

        One that `waits` for a process that is busy would keep the trial from training: it is put off for a while.
        """

    @abstractmethod
    def checkpoint_made(self, step: int, size: int, seconds: float) -> None:
        """A checkpoint was written."""

    @abstractmethod
    def checkpoint_failed(self, reason: str) -> None:
        """A checkpoint could not be written; the one before it counts."""

    def out_of_time(self) -> bool:
        """Whether the trial is to end with the epochs it has, its weights and its value being theirs."""
        return False

    @abstractmethod
    def stop_here(self) -> None:
        """Call between units, after a checkpoint that was due; raises Interrupted when the search stops."""


class Strategy(ABC):
    """A way to train a candidate."""

    name: ClassVar[str]
    exact: ClassVar[bool]
    """Whether the result is that of a plain PyTorch loop."""
    summary: ClassVar[str]
    builds_apart: ClassVar[bool] = False
    """Whether candidates are built in the builder from the first one on, and wait there to be taken apart."""
    spans_devices: ClassVar[bool] = False
    """Whether a trial can be on several devices at the same time."""
    plans: ClassVar[bool] = False
    """Whether it chooses for each trial which strategy trains it."""
    gangs: ClassVar[bool] = False
    """Whether it has units that run on several devices at the same time."""
    policy: str = "fair"
    """By which a device that is free chooses among trials: a name of the scheduler's."""

    def trials_at_once(self, devices: int) -> int:
        """How many trials keep so many devices busy."""
        return devices + self.builds_apart

    def cuts(self) -> bool:
        """Whether it takes models apart, so that one which cannot be cut is not for it."""
        return self.builds_apart

    def check(self, devices: int) -> None:  # noqa: B027 - most strategies run on any number
        """Raise SpecError where it cannot run on so many devices."""

    @abstractmethod
    async def train(self, run: TrialRun) -> None:
        """Train the candidate to its last epoch, reporting each, and leave the weights in `run.weights`."""
