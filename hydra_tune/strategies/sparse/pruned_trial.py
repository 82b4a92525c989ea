"""Plain data of a pruned trial: its start, its cut or stages, and its byte counts.

Workers return these to the coordinator; nothing here needs tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from hydra_tune.strategies.pipeline.staged import Staged
from hydra_tune.strategies.shard.cut import ShardCut
from hydra_tune.training.progress import Progress

ORDER = "1f1b"
"""Order in which micro-batches go through the stages of a pruned network."""


@dataclass(frozen=True)
class StagingRequest:
    """The user's options for a network in stages, and the memory of the devices."""

    stages: int | None
    """None: as few as possible."""
    microbatches: int | None
    devices: int
    room: int
    """Bytes of each device that this trial may use."""


@dataclass(frozen=True)
class Remains:
    """Counts of weights in the pruned layers and of their survivors."""

    pruned: int
    survivors: int


@dataclass(frozen=True)
class Begun:
    """The start of a trial: with a known mask, or dense, in shards, until it is found."""

    dense: ShardCut | None
    history: list[dict[str, float]]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class PrunedStaged:
    """A pruned trial in stages."""

    staged: Staged
    remains: Remains
    devices: int
    needed: int | None
    dense_needed: int | None
    """Devices that the same model needs with strategy `pipeline`."""


@dataclass(frozen=True)
class PrunedCut:
    """A pruned trial in shards."""

    cut: ShardCut
    remains: Remains
    weight_bytes: int
    """Bytes of the dense weights that it computes with; in mixed precision most are 16-bit."""
    state_bytes: int
    """Bytes of all its blocks."""


@dataclass(frozen=True)
class Account:
    """Bytes that a replica stores and sends, compared to dense training of the same model."""

    state_bytes: int
    dense_state_bytes: int
    step_bytes: int
    dense_step_bytes: int
    survivors: int
    pruned: int
    """Weights of the pruned layers."""
    phase: str


@dataclass(frozen=True)
class Trained:
    """The result of a piece of training on one replica."""

    progress: Progress
    account: Account
    sent_bytes: int
    """Bytes passed to all-reduce in this piece."""
