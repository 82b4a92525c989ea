"""A pruned candidate in shards, for networks whose dense 16-bit weights alone exceed a device.

Differs from `shard` only in the contents of the blocks (`shard.plan`): compute weights, and the index, master weights
and optimizer state of the survivors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hydra_tune.engine.remote import remote
from hydra_tune.strategies.base import TrialRun
from hydra_tune.strategies.epochs import InTraining
from hydra_tune.strategies.shard.strategy import InShards
from hydra_tune.strategies.sparse.pruned_trial import PrunedCut
from hydra_tune.strategies.sparse.ticket import in_builder, train_pruned

if TYPE_CHECKING:
    from hydra_tune.strategies.sparse import builder_units as units
    from hydra_tune.strategies.sparse.strategy import Sparse
else:
    units = remote("hydra_tune.strategies.sparse.builder_units")


async def train_in_shards(run: TrialRun, strategy: Sparse) -> None:
    """Train a candidate to its last epoch, on one device at a time."""
    builder = run.candidacy.worker
    assert builder is not None
    budget = min(device.memory for device in run.engine.devices)

    async def prune() -> InTraining:
        made: PrunedCut = await in_builder(run, "cut", units.cut, budget)
        found = PrunedInShards(run, builder, made.cut, True, made=made, strategy=strategy)
        found.note_plan()
        return found

    await train_pruned(run, strategy, None, prune)


@dataclass
class PrunedInShards(InShards):
    """A pruned candidate whose state is in the spill store."""

    made: PrunedCut | None = None
    strategy: Sparse | None = None

    def note_plan(self) -> None:
        assert self.made is not None
        assert self.strategy is not None
        remains = self.made.remains
        self.run.planned("sparse", self.cut.shards, plan={
            "phase": "sparse", "way": "shards", "mask": self.strategy.mask, "precision": self.strategy.precision,
            "pruned_weights": remains.pruned, "survivors": remains.survivors, "shards": self.cut.shards,
            "weight_bytes": self.made.weight_bytes, "state_bytes": self.made.state_bytes,
        })  # fmt: skip
