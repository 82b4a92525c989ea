"""Strategy `sparse`: a pruned network whose state is compressed to the surviving weights (AxoNN with SAMO).

A network that fits a device has a replica on each of several (`replicas.py`). A larger one is trained in pipeline
stages, each device having the compressed state of its own part (`in_stages.py`); or, if even the dense 16-bit weights
exceed a device, in shards that are loaded in turn (`in_shards.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra_tune.core.errors import SpecError, nearest, quoted
from hydra_tune.core.tables import Table
from hydra_tune.strategies.base import Strategy, TrialRun
from hydra_tune.strategies.device_occupancy import DeviceOccupancy
from hydra_tune.strategies.epochs import train_epochs
from hydra_tune.strategies.estimate import Estimate, Look
from hydra_tune.strategies.pool import Pool
from hydra_tune.strategies.sparse import plan_table
from hydra_tune.strategies.sparse.in_shards import train_in_shards
from hydra_tune.strategies.sparse.in_stages import train_in_stages
from hydra_tune.strategies.sparse.pruning import MASKS, Pruning
from hydra_tune.strategies.sparse.replicas import InReplicas

PRECISIONS = ("mixed", "full")
AUTO = "auto"


@dataclass(frozen=True)
class Sparse(Strategy):
    """Train a pruned network, on one device or on several at once."""

    name = "sparse"
    exact = False
    summary = "a pruned network with compressed state: data-parallel on several devices, in stages or in shards"
    own_checkpoints = True
    builds_apart = True
    spans_devices = True
    gangs = True

    sparsity: float = 0.9
    """Fraction of each pruned layer's weights that is removed; a candidate's own `sparsity` takes precedence."""
    mask: str = "early-bird"
    """early-bird: by magnitude, once settled; magnitude: at once; random; or a safetensors file of masks."""
    replicas: int | None = None
    """Number of devices that train the network at the same time; by default all."""
    precision: str = "mixed"
    """mixed: 16-bit compute weights with float32 masters; full: everything in the candidate's own dtype."""
    dense_epochs: int | None = None
    """Maximum epochs of early-bird's search for a mask; by default a fifth of all."""
    rewind: bool = False
    """True if the survivors restart from their initial weights once the mask is found."""
    least: int = 8
    """Minimum number of surviving weights per layer."""
    stages: int | str = 1
    """Number of devices the network is divided over, each with the state of its own part; auto: as few as possible."""
    microbatches: int | None = None
    """In stages: micro-batches per batch; by default four per device, or one if more would change the result."""
    shards: bool = False
    """True to train in shards that are spilled and loaded in turn, on one device at a time."""
    occupancy: DeviceOccupancy = field(default_factory=DeviceOccupancy, init=False, compare=False, repr=False)
    """Devices occupied by trials in stages."""

    def __post_init__(self) -> None:
        check_sparsity(self.sparsity)
        _check_mask(self.mask)
        if self.precision not in PRECISIONS:
            raise SpecError(f"precision cannot be {quoted(self.precision)}", nearest(str(self.precision), PRECISIONS))
        for option, at_least in (("replicas", 1), ("dense_epochs", 0), ("least", 1), ("microbatches", 1)):
            value = getattr(self, option)
            if value is not None and not _whole_number(value, at_least):
                raise SpecError(f"{option} cannot be {quoted(value)}", f"give a whole number from {at_least} on")
        if self.stages != AUTO and not _whole_number(self.stages, 1):
            raise SpecError(f"stages cannot be {quoted(self.stages)}", "give a whole number from 1 on, or auto")
        if not isinstance(self.shards, bool):
            raise SpecError(f"shards cannot be {quoted(self.shards)}", "give true or false")
        self._check_together()
        if self.shards:
            object.__setattr__(self, "policy", "lazy-lrtf")  # as in strategy shard: a turn costs transfers

    def _check_together(self) -> None:
        """Raise SpecError if options exclude each other."""
        if self.in_stages and self.shards:
            raise SpecError(f"stages cannot be {quoted(self.stages)} with shards", "give stages or shards, not both")
        if self.microbatches is not None and not self.in_stages:
            raise SpecError(
                f"microbatches cannot be {self.microbatches} without stages", "give stages: auto, or a number"
            )
        cut = f"stages {self.stages}" if self.in_stages else "shards" if self.shards else ""
        if cut and self.replicas not in (None, 1):
            raise SpecError(f"replicas cannot be {self.replicas} with {cut}", "leave replicas out: there is one then")

    @property
    def in_stages(self) -> bool:
        return self.stages != 1

    def cuts(self) -> bool:
        return self.in_stages or self.shards

    def check(self, devices: int) -> None:
        for option in ("replicas", "stages"):
            value = getattr(self, option)
            if isinstance(value, int) and value > devices:
                raise SpecError(f"{option} cannot be {value}", f"there are {devices} devices")

    def pruning(self, run: TrialRun) -> Pruning:
        """Return the pruning options for this candidate."""
        blueprint = run.blueprint
        dense = max(1, blueprint.epochs // 5) if self.dense_epochs is None else self.dense_epochs
        return Pruning(
            sparsity=self.sparsity if blueprint.sparsity is None else blueprint.sparsity, mask=self.mask,
            dense_epochs=min(dense, blueprint.epochs - 1),  # at least the last epoch trains the pruned network
            least=self.least, rewind=self.rewind, mixed=self.precision == "mixed",
        )  # fmt: skip

    def trials_at_once(self, devices: int) -> int:
        """Return one trial per group of devices, plus one, except in stages, where another would take memory."""
        if self.shards:
            return devices + 1
        if self.in_stages:
            return max(1, devices // self.stages) if isinstance(self.stages, int) else 1
        return devices // (self.replicas or devices) + 1

    @classmethod
    def estimate(cls, look: Look, pool: Pool) -> Estimate:
        from hydra_tune.strategies.sparse.estimate import estimate  # imports torch, so only in workers

        return estimate(look, pool)

    @classmethod
    def describe_plan(cls, plan: Mapping[str, Any]) -> Iterable[str | Table]:
        return plan_table.describe(plan)

    async def train(self, run: TrialRun) -> None:
        if self.shards:
            await train_in_shards(run, self)
        elif self.in_stages:
            await train_in_stages(run, self)
        else:
            await train_epochs(run, await InReplicas.loaded(run, self))


def check_sparsity(value: Any) -> None:
    """Raise SpecError unless `value` is a number from 0 to below 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise SpecError(f"sparsity cannot be {quoted(value)}", "give a number from 0 to below 1, such as 0.9")


def _check_mask(mask: Any) -> None:
    if not isinstance(mask, str):
        raise SpecError(f"mask cannot be {quoted(mask)}", f"give {', '.join(MASKS)} or a safetensors file")
    if mask not in MASKS and not mask.endswith(".safetensors"):
        raise SpecError(f"mask cannot be {quoted(mask)}", f"{nearest(mask, MASKS)}, or a .safetensors file")
    if mask not in MASKS and not Path(mask).is_file():
        raise SpecError(f"there is no mask file {quoted(mask)}", "give the path of a safetensors file")


def _whole_number(value: Any, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least
