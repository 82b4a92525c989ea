"""Strategy `shard`: models larger than a device, in shards that come and go, several models taking turns.

The builder cuts a candidate into the fewest shards that fit a device and writes them to the spill store. Each unit then
trains the trial for about a second on whichever device is free: the forward of every shard, loss and backward of the
last, the backward of the others, each shard brought in while the one before it computes. Every now and then, mostly at
the end of a unit, the trial's state is committed to the spill store: the next unit may then run on another device, and
a device that is lost costs what was trained since. The weights are those of a plain loop, whatever the cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hydra_tune.core.errors import SpecError, WorkerLost, nearest, quoted
from hydra_tune.engine.remote import remote
from hydra_tune.engine.scheduler import FOR_WHOLE_TRIALS
from hydra_tune.engine.unit import Memory, Role, UnitFailed
from hydra_tune.strategies.base import Strategy, TrialRun
from hydra_tune.strategies.epochs import SLICE_SECONDS, InTraining, SavedCheckpoint, train_epochs
from hydra_tune.strategies.estimate import Estimate, Look
from hydra_tune.strategies.pool import Pool
from hydra_tune.strategies.recovery import Recovery
from hydra_tune.strategies.shard.cut import ShardCut, SliceDone, Spilled
from hydra_tune.training.progress import Progress

if TYPE_CHECKING:
    from hydra_tune.strategies.shard import units as units
else:
    units = remote("hydra_tune.strategies.shard.units")

UNKNOWN = -1
"""Number of commits if unknown: the worker that takes the trial up reads it from the trial's files."""


@dataclass(frozen=True)
class Shard(Strategy):
    """Train in shards that fit a device; a model that fits as a whole is one shard."""

    name = "shard"
    exact = True
    summary = "models larger than a device, in shards that are spilled to host memory and disk"
    soon_done = "in shards it is soon done"
    parts = "shards"
    begin_seconds = 2.0
    last_resort = True
    builds_apart = True

    double_buffering: bool = True
    """True if the next shard is brought in while the present one computes."""
    policy: str = "lazy-lrtf"
    """Rule for the trial that a free device takes: by default the one with the most work left, but the one at hand
    unless another has far more left."""

    def __post_init__(self) -> None:
        if self.policy not in FOR_WHOLE_TRIALS:
            raise SpecError(f"policy cannot be {quoted(self.policy)}", nearest(str(self.policy), FOR_WHOLE_TRIALS))
        if not isinstance(self.double_buffering, bool):
            raise SpecError(f"double_buffering cannot be {quoted(self.double_buffering)}", "give true or false")

    @classmethod
    def estimate(cls, look: Look, pool: Pool) -> Estimate:
        from hydra_tune.strategies.shard.estimate import estimate  # brings torch, which workers have

        return estimate(look, pool)

    @classmethod
    def memory(cls, estimate: Estimate, *, alone: bool) -> Memory | None:
        return Memory(estimate.needed_bytes, spills=True) if estimate.needed_bytes else None

    async def train(self, run: TrialRun) -> None:
        candidate = await InShards.cut_for(run, self.double_buffering)
        candidate.note_plan()
        await run.restored(candidate.history, candidate.cut.notes)
        await train_epochs(run, candidate)


@dataclass
class InShards(InTraining):
    """A candidate whose state is in the spill store."""

    run: TrialRun
    builder: int
    cut: ShardCut
    double_buffering: bool
    commits: int = 0
    """Number of commits of its state; a worker that has seen fewer takes the trial up anew."""
    home: int | None = None
    """Id of the worker that has trained past the last commit; None if there is none."""
    recovery: Recovery = field(default_factory=Recovery)
    _noted: bool = False
    """True once the comparison of the first batch is noted."""

    @classmethod
    async def cut_for(cls, run: TrialRun, double_buffering: bool) -> InShards:
        """Cut a candidate that waits in the builder, with the state of its newest checkpoint."""
        builder = run.candidacy.worker
        assert builder is not None
        budget = min(device.memory for device in run.engine.devices)
        result = await run.unit(
            "cut", units.cut, run.attempt, run.number, run.seed, budget, run.checkpoints, run.profiles,
            role=Role.BUILDER, worker=builder,
        )  # fmt: skip
        cut: ShardCut = result.value
        return cls(run, builder, cut, double_buffering)

    def __post_init__(self) -> None:
        self.history = list(self.cut.history)
        self.epoch = len(self.history)

    def note_plan(self) -> None:
        """Record the number of its shards."""
        self.run.planned(Shard.name, self.cut.shards)

    async def train(self, remaining: float | None) -> Progress:
        progress: Progress = (await self._unit("train", units.train_slice, SLICE_SECONDS, remaining=remaining)).value
        if self.cut.comparison and not self._noted:
            self._noted = True
            self.run.note("check", self.cut.comparison)
        return progress

    async def end_epoch(self, remaining: float | None) -> dict[str, float]:
        done = await self._unit("evaluate", units.end_epoch, self.epoch, remaining=remaining)
        metrics: dict[str, float] = done.value
        self.epoch += 1
        return metrics

    async def keep_weights(self) -> None:
        await self._unit("keep", units.keep_weights)

    async def checkpoint(self) -> SavedCheckpoint:
        if self.home is not None:
            await self._unit("commit", units.commit)
        saved: SavedCheckpoint = await self._in_builder("checkpoint", units.checkpoint, self.run.checkpoints)
        return saved

    def checkpoint_waits(self) -> bool:
        return self.run.engine.is_busy(self.builder)

    async def save(self) -> None:
        await self._in_builder("save", units.save, self.run.weights)

    async def _unit(
        self, kind: str, work: Callable[..., SliceDone], *args: Any, remaining: float | None = None
    ) -> SliceDone:
        """Run a unit where the trial is, or on any device after a commit.

        A unit that fails or is lost is repeated from the last commit, with the same result.
        """
        while True:
            spilled = Spilled(self.cut.places, self.cut.name, self.cut.kit, self.commits, self.double_buffering)
            try:
                result = await self.run.unit(
                    kind, work, self.run.attempt, spilled, *args, worker=self.home, remaining=remaining
                )
            except UnitFailed as error:
                if error.failure.status != "OUT_OF_MEMORY":
                    raise
                self.home = None
                self.run.engine.let_go(self.run.attempt)
                await self._cut_smaller(error)
            except WorkerLost as error:
                if not self.recovery.again(None if self.commits == UNKNOWN else self.commits):
                    raise
                # Whether its last commit was made before it ended is known from the files alone.
                self.home, self.commits = None, UNKNOWN
                self.run.note("lost", f"{error}; the trial goes on from its last commit")
            else:
                done: SliceDone = result.value
                self.commits = done.commits
                self.home = None if done.committed else result.worker
                if done.committed and self.run.memory is not None:
                    self.run.engine.let_go(self.run.attempt)
                self.run.spilled(done.read_bytes, done.written_bytes)
                return done

    async def _cut_smaller(self, error: UnitFailed) -> None:
        """Cut the trial anew after a step that did not fit, by its batch's costs; raise an error if no cut fits."""
        failure = error.failure
        self.cut = await self._in_builder("cut again", units.cut_again, failure.facts, failure.message)
        self.commits = UNKNOWN
        self.run.note("out of memory", f"{failure.message}; now in {self.cut.shards} shards")
        self.note_plan()

    async def _in_builder(self, kind: str, work: Callable[..., Any], *args: Any) -> Any:
        return (await self.run.unit(kind, work, self.run.attempt, *args, role=Role.BUILDER, worker=self.builder)).value
