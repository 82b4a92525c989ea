"""Estimates of the time and memory a strategy needs for a candidate, and the facts they are computed from.

Seconds are for an epoch with its evaluation, on devices that nothing else uses. `work` sums over the devices; it
decides where trials outnumber devices. Moved bytes are per epoch, between devices or to and from the spill store. A
strategy that cannot run, or would change results unasked, is refused with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hydra_tune.strategies.pool import Rates

if TYPE_CHECKING:
    from hydra_tune.strategies.shard.prepare import Prospect
    from hydra_tune.training.loop import Training
    from hydra_tune.training.prepared import Prepared

PIECE_SECONDS = 0.05
"""Seconds to form a group of replicas, or to begin and end a phase of training."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds and bytes that a strategy needs, or the reason why it is refused."""

    strategy: str
    seconds: float = math.inf
    """Seconds per epoch."""
    work: float = math.inf
    """Seconds per epoch, summed over devices."""
    batch_seconds: float = math.inf
    """Seconds per training batch."""
    device_bytes: int = 0
    """Peak bytes on the device that holds most."""
    held_bytes: int = 0
    """Bytes that stay on that device between two units."""
    needed_bytes: int = 0
    """For a strategy that spills: the least bytes of device memory it can run with."""
    host_bytes: int = 0
    disk_bytes: int = 0
    moved_bytes: int = 0
    """Bytes per epoch."""
    devices: int = 1
    """Number of devices used at the same time."""
    members: int = 1
    """Number of trials that train as one; seconds and bytes are of all of them, `work` of one."""
    signature: str = ""
    """Signature by which trials find others to train with."""
    parts: int = 1
    """Number of shards, stages, replicas, subnets or clients."""
    refused: str = ""
    smallest_budget: int | None = None
    """If refused for lack of memory: the device_memory in bytes that would suffice."""

    def scaled(self, factor: float) -> Estimate:
        """Return the estimate with all times multiplied by `factor`."""
        seconds, work, batch = (factor * each for each in (self.seconds, self.work, self.batch_seconds))
        return replace(self, seconds=seconds, work=work, batch_seconds=batch)

    def at_pace(self, batch_seconds: float) -> Estimate:
        """Return the estimate scaled to this time per batch."""
        return self.scaled(batch_seconds / self.batch_seconds) if 0 < self.batch_seconds < math.inf else self


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """The amount of work in an epoch."""

    batches: int
    valid_batches: int = 0
    rows: int = 0
    """Rows of a training batch."""
    valid_rows: int = 0
    """Rows of all validation batches together."""


@dataclass(frozen=True)
class Rehearsal:
    """Measured costs of training the whole candidate on one otherwise idle device."""

    batch_seconds: float
    """Seconds per training batch, including its data."""
    judge_seconds: float
    """Seconds per validation batch."""
    peak_bytes: int
    state_bytes: int
    """Bytes that stay between batches: parameters, buffers, optimizer state."""


def refused(strategy: str, why: str, *, smallest_budget: int | None = None) -> Estimate:
    """Return an estimate that refuses the strategy for this reason."""
    return Estimate(strategy=strategy, refused=why, smallest_budget=smallest_budget)


class Look(Protocol):
    """A built candidate and its measurements, in the worker that has it; each measurement is made once."""

    prepared: Prepared
    training: Training
    profiles: Path
    """Directory of measured costs."""
    directory: Path
    """Directory of the run, on shared memory while there is room."""
    rehearsal: Rehearsal | None
    """None if the candidate is too large to be rehearsed whole, or if the rehearsal failed."""
    failed: str
    """Error of the rehearsal; empty if there was none."""
    parameter_bytes: int
    fetch_seconds: float
    """Seconds to make a batch of data."""

    def copies(self, count: int) -> Sequence[Prepared]:
        """Return independent copies of the candidate, for rehearsals; data that do not change are shared."""
        ...

    @property
    def epoch(self) -> Epoch:
        """The amount of work in an epoch."""
        ...

    @property
    def observed(self) -> Prospect:
        """The model's nodes as a batch showed them, with their costs: for shards."""
        ...

    @property
    def prospect(self) -> Prospect:
        """The captured model with the costs of its nodes."""
        ...

    @property
    def rates(self) -> Rates:
        """Speeds of this machine."""
        ...


def not_rehearsed(look: Look) -> str:
    """Return the reason why there is no rehearsal."""
    return f"its rehearsal failed ({look.failed})" if look.failed else "the model is too large to be rehearsed"
