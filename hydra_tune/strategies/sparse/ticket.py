"""A candidate whose mask is found during training: dense in shards at first, then pruned and divided again.

Shards fit any device, so the search for a mask needs no more memory than the training after it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hydra_tune.engine.remote import remote
from hydra_tune.engine.unit import Role
from hydra_tune.strategies.base import TrialRun
from hydra_tune.strategies.epochs import InTraining, SavedCheckpoint, train_epochs
from hydra_tune.strategies.shard.strategy import InShards
from hydra_tune.strategies.sparse.pruned_trial import Begun, StagingRequest
from hydra_tune.training.progress import Progress

if TYPE_CHECKING:
    from hydra_tune.strategies.sparse import builder_units as units
    from hydra_tune.strategies.sparse.strategy import Sparse
else:
    units = remote("hydra_tune.strategies.sparse.builder_units")

Prune = Callable[[], Awaitable[InTraining]]
"""Divides the pruned network and loads it on devices."""


async def train_pruned(run: TrialRun, strategy: Sparse, wanted: StagingRequest | None, prune: Prune) -> None:
    """Train a candidate to its last epoch: dense until its mask is known, then as divided by `prune`."""
    budget = min(device.memory for device in run.engine.devices)
    begun: Begun = await in_builder(
        run, "begin", units.begin, run.number, run.seed, strategy.pruning(run), wanted, budget, run.checkpoints,
        run.profiles,
    )  # fmt: skip
    candidate = WithTicket(run, strategy, begun, prune)
    if begun.dense is None:
        candidate.current = await prune()
    await run.restored(begun.history, begun.notes)
    await train_epochs(run, candidate)


async def in_builder(run: TrialRun, kind: str, work: Callable[..., Any], *args: Any) -> Any:
    """Run a unit in the builder, which has the candidate."""
    assert run.candidacy.worker is not None
    return (await run.unit(kind, work, run.attempt, *args, role=Role.BUILDER, worker=run.candidacy.worker)).value


@dataclass
class WithTicket(InTraining):
    """A candidate that trains dense until it is pruned; delegates to `current`."""

    run: TrialRun
    strategy: Sparse
    begun: Begun
    prune: Prune
    current: InTraining = field(init=False)
    _searching: bool = False
    _looked_at: int = 0
    """Number of finished epochs at the builder's last search for a mask."""

    def __post_init__(self) -> None:
        self.history = list(self.begun.history)
        self._epoch = len(self.history)
        if self.begun.dense is not None:
            builder = self.run.candidacy.worker
            assert builder is not None
            self.current = DenseInShards(self.run, builder, self.begun.dense, True, mask=self.strategy.mask)
            self.current.note_plan()
            self._searching = True

    async def train(self, remaining: float | None) -> Progress:
        if self._searching and self._looked_at < self._epoch:
            self._looked_at = self._epoch
            if await in_builder(self.run, "look", units.look):
                self._searching = False
                self.run.engine.drop(self.run.attempt, Role.DEVICE)
                self.current = await self.prune()
        return await self.current.train(remaining)

    async def end_epoch(self, remaining: float | None) -> dict[str, float]:
        judged = await self.current.end_epoch(remaining)
        self._epoch += 1
        return judged

    async def keep_weights(self) -> None:
        await self.current.keep_weights()

    async def checkpoint(self) -> SavedCheckpoint:
        return await self.current.checkpoint()

    def checkpoint_waits(self) -> bool:
        return self.current.checkpoint_waits()

    async def save(self) -> None:
        await self.current.save()


@dataclass
class DenseInShards(InShards):
    """A candidate whose mask is being searched for."""

    mask: str = ""

    def note_plan(self) -> None:
        self.run.planned("sparse", self.cut.shards, plan={"phase": "dense", "mask": self.mask, "way": "shards"})
