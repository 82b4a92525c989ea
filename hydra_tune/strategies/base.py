"""The contract between the search and a strategy.

A strategy is straight-line async code that awaits units. It does not choose devices. A failed unit raises where it is
awaited: the strategy may recover there, otherwise the search decides whether to retry the trial. Pruning and
interruption raise too, so a strategy has nothing to clean up: when its coroutine ends, its state on the devices is
dropped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hydra_tune.core.tables import Table
from hydra_tune.engine.engine import Engine
from hydra_tune.engine.unit import Memory, Role, StepRecord, Unit, UnitResult
from hydra_tune.strategies.estimate import Estimate, Look, refused
from hydra_tune.strategies.pool import Pool
from hydra_tune.training.builds import Blueprint
from hydra_tune.training.progress import Progress


class Pruned(Exception):
    """Raised by `report`: the pruner has ended the trial."""


class Reconsidered(Exception):
    """Raised between units, after a checkpoint: another strategy continues the trial."""


class Interrupted(Exception):
    """Raised by `stop_here`: the search stops, and the trial continues when the search is resumed."""


def never(_progress: Progress) -> bool:
    """Return False: the default `reconsider`, which never changes the strategy."""
    return False


@dataclass(frozen=True)
class Candidacy:
    """The place of a built candidate: the worker that built it, or a parcel that any device can load."""

    worker: int | None = None
    parcel: bytes | None = None
    held: bool = False
    """True if that worker is the builder."""


@dataclass
class TrialRun(ABC):
    """One attempt at one trial, as its strategy sees it."""

    number: int
    seed: int
    attempt: str
    metric: str
    maximize: bool
    weights: Path
    """File for the trained weights."""
    checkpoints: Path
    """Directory of checkpoints, including those of earlier attempts."""
    profiles: Path
    """Directory of measured model costs, shared by all trials and runs."""
    engine: Engine
    at_once: int
    """Maximum number of trials on the devices at the same time."""
    blueprint: Blueprint = field(init=False)
    """Facts about the built candidate; set once it is built."""
    candidacy: Candidacy = field(init=False)
    """Place of the built candidate; set once it is built."""
    memory: Memory | None = None
    """Device memory that the trial needs, if it was planned."""
    remaining_at_first: float | None = None
    """Expected seconds of training, before anything is measured."""
    retried: bool = False
    """True if an attempt at the trial failed before in this run."""
    signature: str = ""
    """Signature by which the trial finds others to train with, if the planner found one."""
    members: int = 1
    """Most trials that train as one with it, by its plan."""
    reconsider: Callable[[Progress], bool] = never
    """Asked between units; True if another strategy should continue the trial from here."""

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
        """Run one unit of this trial. Short, numerous units are not `recorded` singly; `worked` reports their sums."""
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
        """Run a unit on several devices at the same time, as ranks of one torch.distributed group.

        `members` has the arguments of each rank, `workers` the worker it must run in, or None for any. All ranks fail
        together.
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
        """Return the bytes of each device that the trial may use, with equal shares for concurrent trials."""
        devices = self.engine.devices
        shares = (device.memory // self.at_once for device in devices)
        return tuple(min(pair) for pair in zip(shares, self.engine.room(self.attempt), strict=True))

    def release_builder(self) -> None:
        """Let the builder drop the candidate, which has arrived on its device."""
        self.engine.drop(self.attempt, Role.BUILDER)

    def better(self, value: float, than: float | None) -> bool:
        """True if `value` is better than `than`, in the direction of the search."""
        if than is None:
            return True
        return value > than if self.maximize else value < than

    @abstractmethod
    def deadline(self, kind: str) -> float | None:
        """Return the seconds that a unit of this kind may go without a sign of life."""

    @abstractmethod
    def measured(self, kind: str, seconds: float) -> None:
        """Record the seconds that a unit of this kind took."""

    @abstractmethod
    def progress(self, progress: Progress) -> None:
        """Show how far training is."""

    @abstractmethod
    def remaining(self, progress: Progress) -> float | None:
        """Return the expected seconds of training left, for the scheduler; None if nothing was measured."""

    @abstractmethod
    def planned(self, strategy: str, shards: int, plan: dict[str, Any] | None = None) -> None:
        """Record the strategy, its number of shards or stages, and its `plan` as plain data."""

    @abstractmethod
    async def bring(self, *, apart: bool, anew: bool) -> None:
        """Bring the candidate to the builder (`apart`) or to where a device can load it; `anew` builds it again."""

    @abstractmethod
    async def suggest(self, name: str, choices: Sequence[str]) -> str:
        """Have the sampler choose, as an additional hyperparameter of the trial."""

    @abstractmethod
    def chosen(self, strategy: str, choice: dict[str, Any]) -> None:
        """Record that this strategy continues the trial; `choice` has the reason and the predictions as plain data."""

    @abstractmethod
    def took(self, batch_seconds: float) -> None:
        """Record the seconds of one batch under the chosen strategy."""

    @abstractmethod
    def worked(self, device: str, steps: Sequence[StepRecord]) -> None:
        """Report the totals of units that were not recorded singly."""

    @abstractmethod
    def spilled(self, read: int, written: int) -> None:
        """Count bytes read from and written to the spill store."""

    @abstractmethod
    def communicated(self, size: int) -> None:
        """Count bytes of state or gradients sent between the parts of a trial that train apart."""

    @abstractmethod
    def note(self, kind: str, message: str) -> None:
        """Record an event of the trial, with a message for the user."""

    @abstractmethod
    async def report(self, epoch: int, metrics: dict[str, float]) -> None:
        """Report all metrics of an epoch, at its end; raises Pruned if the trial must end."""

    @abstractmethod
    async def restored(self, history: list[dict[str, float]], notes: tuple[str, ...]) -> None:
        """Record a resumed checkpoint: metrics of the earlier epochs, and notes on damaged checkpoints."""

    @abstractmethod
    def checkpoint_due(self, *, waits: bool = False) -> bool:
        """True if a checkpoint is due: periodically, and before the search stops.

        A checkpoint that `waits` for a busy process would hold up training, so it is postponed for a while.
        """

    @abstractmethod
    def checkpoint_made(self, step: int, size: int, seconds: float) -> None:
        """Record that a checkpoint of `size` bytes was written at this step."""

    @abstractmethod
    def checkpoint_failed(self, reason: str) -> None:
        """Record that a checkpoint could not be written; the previous one stays valid."""

    def room_for_more(self) -> None:  # noqa: B027 - most strategies have a fixed limit
        """Call when the strategy's number of trials at once may have changed."""

    def out_of_time(self) -> bool:
        """True if the trial must end with the epochs it has finished; their weights and value are its result."""
        return False

    @abstractmethod
    def stop_here(self) -> None:
        """Call between units, after any checkpoint that was due; raises Interrupted if the search stops."""


class Strategy(ABC):
    """A way to train a candidate."""

    name: ClassVar[str]
    exact: ClassVar[bool]
    """True if the result equals that of a plain PyTorch loop."""
    summary: ClassVar[str]
    builds_apart: ClassVar[bool] = False
    """True if every candidate, the first included, is built in the builder, where it is then divided."""
    spans_devices: ClassVar[bool] = False
    """True if a trial can be on several devices at the same time."""
    plans: ClassVar[bool] = False
    """True if the strategy chooses another strategy for each trial."""
    gangs: ClassVar[bool] = False
    """True if the strategy has units that run on several devices at the same time."""
    simpler: ClassVar[tuple[str, ...]] = ("whole",)
    """If one of these strategies would finish soon, it is preferred and this one is not estimated."""
    soon_done: ClassVar[str] = "it trains in a short time"
    """Reason shown if the strategy would finish soon and others are not estimated."""
    parts: ClassVar[str] = "parts"
    """Name of a trial's parts, in the plural."""
    begin_seconds: ClassVar[float] = 5.0
    """Seconds to bring a candidate to its devices, before anything is measured."""
    own_checkpoints: ClassVar[bool] = False
    """True if checkpoints cannot be exchanged with other strategies."""
    last_resort: ClassVar[bool] = False
    """True if it can train models that fit no other strategy; it is then tried without an estimate."""
    policy: str = "fair"
    """Name of the scheduler policy by which a free device chooses among trials."""

    def trials_at_once(self, devices: int) -> int:
        """Return the number of trials that keep this many devices busy."""
        return devices + self.builds_apart

    def joined(self, devices: int) -> int:
        """Return the number of trials that need no device of their own, as they train as one with others."""
        return 0

    def cuts(self) -> bool:
        """True if the strategy divides models, and so cannot train a model that cannot be cut."""
        return self.builds_apart

    def check(self, devices: int) -> None:  # noqa: B027 - most strategies run on any number
        """Raise SpecError if the strategy cannot run on this many devices."""

    @classmethod
    def estimate(cls, look: Look, pool: Pool) -> Estimate:
        """Estimate seconds and bytes, in the worker that has the candidate; a refused strategy is not chosen."""
        return refused(cls.name, "it has no estimate, so the planner cannot choose it")

    @classmethod
    def memory(cls, estimate: Estimate, *, alone: bool) -> Memory | None:
        """Return the device memory that a trial with this estimate needs; None if unknown.

        `alone` says that no other trial takes turns on its device.
        """
        return None

    @classmethod
    def describe_plan(cls, plan: Mapping[str, Any]) -> Iterable[str | Table]:
        """Yield the plan recorded with `run.planned` as lines and tables for people."""
        return ()

    @abstractmethod
    async def train(self, run: TrialRun) -> None:
        """Train the candidate to its last epoch, reporting each, and leave the weights in `run.weights`."""
