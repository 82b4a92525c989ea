"""Plain data of a trial in rounds: its options, its place in the spill store, and the results of its phases.

The coordinator and the workers exchange these; nothing here needs tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra_tune.spill.store import SpillFiles

DEALS = ("auto", "width", "depth")
"""Ways to deal a model out to subnets."""


@dataclass(frozen=True)
class SubnetRequest:
    """The options for training in rounds."""

    subnets: int
    local_steps: int
    travels: bool
    deal: str | None = None
    """The way to deal the model out, one of DEALS; None if every subnet is the whole model and all are averaged."""
    shared_batches: bool = False
    """True if free clients take the next batches; False if each subnet has batches of its own."""
    pinned: bool = False
    """True if each subnet has a data set of its own, which only its worker may read."""
    centre_shards: int = 0
    """Number of shards of the centre; 0 without a centre."""


@dataclass(frozen=True)
class Spot:
    """The files of a trial in rounds."""

    places: tuple[str, ...]
    name: str
    kit: str

    def files(self, *part: str) -> SpillFiles:
        return SpillFiles([Path(place) for place in self.places], "/".join((self.name, *part)))


@dataclass(frozen=True)
class SubnetLayout:
    """The coordinator's record of a trial in rounds."""

    spot: Spot
    position: dict[str, Any]
    history: list[dict[str, float]]
    account: list[dict[str, Any]]
    """Counts of each finished epoch: rounds, losses, bytes."""
    current: dict[str, Any]
    """Counts of the current epoch."""
    batches: int
    accumulate: int
    dealt: dict[str, int]
    """Number of members dealt out, by kind: neurons, filters, heads or blocks."""
    parameters: int
    subnet_parameters: int
    """Parameters of the largest subnet of a round."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PhaseDone:
    """The counts of a subnet's phase; its tensors are in the spill store."""

    index: int
    bytes: int
    rows: int
    loss_sum: float


def share_of(batches: int, index: int, of: int) -> int:
    """Return the number of an epoch's batches that subnet `index` out of `of` gets."""
    return max(0, -((index - batches) // of))
