"""A pruned candidate on several devices at once: every replica has the whole network and a part of each batch.

Gradients are reduced over the replicas in a gang unit. Each piece of training ends with a commit of the whole state,
which is small: if a replica dies, all are recreated from it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from hydra_tune.core.errors import CandidateError, WorkerLost
from hydra_tune.engine.remote import remote
from hydra_tune.engine.unit import Role
from hydra_tune.strategies.base import TrialRun
from hydra_tune.strategies.concurrent_units import all_of
from hydra_tune.strategies.epochs import InTraining, SavedCheckpoint
from hydra_tune.strategies.recovery import Recovery
from hydra_tune.strategies.sparse.pruned_trial import Trained
from hydra_tune.training.builds import pack_held
from hydra_tune.training.progress import Progress

if TYPE_CHECKING:
    from hydra_tune.strategies.sparse import builder_units as builder_units
    from hydra_tune.strategies.sparse import units as units
    from hydra_tune.strategies.sparse.strategy import Sparse
else:
    builder_units = remote("hydra_tune.strategies.sparse.builder_units")
    units = remote("hydra_tune.strategies.sparse.units")

_T = TypeVar("_T")

SLICE_SECONDS = 2.0
"""Seconds per piece of training: each forms a process group, for some 30 ms, and ends with a commit."""


@dataclass
class InReplicas(InTraining):
    """A candidate with a replica on each of several devices."""

    run: TrialRun
    strategy: Sparse
    workers: list[int]
    parcel: bytes
    size: int
    """Number of replicas."""
    history: list[dict[str, float]] = field(default_factory=list)
    _pace: float | None = None
    """Seconds per batch, as last measured."""
    recovery: Recovery = field(default_factory=Recovery)
    _at: Progress | None = None
    """Progress after the last piece of training."""

    @classmethod
    async def loaded(cls, run: TrialRun, strategy: Sparse) -> InReplicas:
        """Create a replica of the candidate, which waits in the builder, on each device."""
        builder = run.candidacy.worker
        size = await cls._replicas(run, strategy)
        packed = await run.unit("pack", pack_held, run.attempt, role=Role.BUILDER, worker=builder)
        found = cls(run, strategy, [], packed.value, size)
        run.planned(strategy.name, shards=1, plan=None)
        notes = await found._again(found._load)
        await run.restored(found.history, notes)
        return found

    @staticmethod
    async def _replicas(run: TrialRun, strategy: Sparse) -> int:
        """The number of replicas: one, where parts of a batch would have another loss than the whole."""
        size = strategy.replicas or len(run.engine.devices)
        if size == 1:
            return 1
        checked = await run.unit(
            "check", builder_units.why_one_replica, run.attempt, run.seed, size, role=Role.BUILDER,
            worker=run.candidacy.worker,
        )  # fmt: skip
        if not checked.value:
            return size
        if strategy.replicas is not None:
            raise CandidateError(f"replicas is {size}, but {checked.value}", "use replicas: 1")
        run.note("replicas", f"one replica: {checked.value}")
        return 1

    async def _load(self) -> tuple[str, ...]:
        run, strategy, size = self.run, self.strategy, self.size
        at, pruning = run.engine.workers_of_all_devices(), strategy.pruning(run)
        self.workers = [at[(run.number * size + rank) % len(at)] for rank in range(size)]
        found = await all_of(
            run.unit("load", units.load, run.attempt, run.seed, self.parcel, run.checkpoints, pruning, rank, size,
                     worker=worker)
            for rank, worker in enumerate(self.workers)
        )  # fmt: skip
        self.history = list(found[0].value.history)
        notes: tuple[str, ...] = found[0].value.notes
        return notes

    async def train(self, remaining: float | None) -> Progress:
        trained = await self._again(lambda: self._train_some(remaining))
        progress = trained.progress
        self._at = progress
        if progress.batches_done:
            self._pace = progress.seconds / progress.batches_done
        self.run.communicated(trained.sent_bytes * len(self.workers))
        self._note_plan(trained)
        return progress

    async def _train_some(self, remaining: float | None) -> Trained:
        run = self.run
        accumulate = run.blueprint.accumulate
        count = 2 if self._pace is None else max(1, int(SLICE_SECONDS / self._pace))
        batches = -(-count // accumulate) * accumulate  # a commit holds no gradients
        members = [(run.attempt, batches)] * len(self.workers)
        results = await run.gang("train", units.train, members, workers=self.workers, remaining=remaining)
        trained: Trained = results[0].value
        return trained

    async def end_epoch(self, remaining: float | None) -> dict[str, float]:
        return await self._again(lambda: self._end_epoch(remaining))

    async def _end_epoch(self, remaining: float | None) -> dict[str, float]:
        run, epoch = self.run, self._at.epoch if self._at else 0
        result = await run.unit(
            "evaluate", units.judge, run.attempt, epoch, worker=self.workers[0], remaining=remaining
        )
        judged: dict[str, float] = result.value
        # The first replica goes last: its commit says that all replicas have advanced.
        for worker in reversed(self.workers):
            await run.unit("end epoch", units.next_epoch, run.attempt, epoch, judged, worker=worker, recorded=False)
        return judged

    async def keep_weights(self) -> None:
        await self._on_first("keep", units.keep_weights)

    async def checkpoint(self) -> SavedCheckpoint:
        saved: SavedCheckpoint = await self._on_first("checkpoint", units.checkpoint, self.run.checkpoints)
        return saved

    async def save(self) -> None:
        await self._on_first("save", units.save, self.run.weights)

    async def _on_first(self, kind: str, work: Callable[..., Any], *args: Any) -> Any:
        run = self.run
        return (await self._again(lambda: run.unit(kind, work, run.attempt, *args, worker=self.workers[0]))).value

    async def _again(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Run the work; if a worker is lost, recreate all replicas from the last commit and run it again."""
        while True:
            try:
                return await work()
            except WorkerLost as error:
                if not self.recovery.again(self._at.steps if self._at else 0) or not self.parcel:
                    raise
                self.run.note("replicas", f"{error.message}; all replicas go on from the last commit")
                if self.workers:
                    await self._again(self._load)

    def _note_plan(self, trained: Trained) -> None:
        account = trained.account
        self.run.planned(self.strategy.name, shards=1, plan={
            "replicas": len(self.workers), "phase": account.phase, "precision": self.strategy.precision,
            "mask": self.strategy.mask, "pruned_weights": account.pruned, "survivors": account.survivors,
            "state_bytes": account.state_bytes, "dense_state_bytes": account.dense_state_bytes,
            "step_bytes": account.step_bytes, "dense_step_bytes": account.dense_step_bytes,
        })  # fmt: skip
