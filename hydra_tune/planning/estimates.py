"""What training a candidate by each strategy would take: pure functions of what was measured, a pool and rates.

Seconds are those of an epoch with its evaluation, on devices that nobody else uses. `work` is the sum over the devices:
where trials outnumber devices, that is what counts. Bytes moved are those of an epoch, between devices or to and from
the spill store. A strategy that cannot run, or that changes results in ways that were not asked for, is refused with a
reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hydra_tune.devices import format_bytes
from hydra_tune.graph.costs import ShardCost
from hydra_tune.planning.pool import Pool, Rates
from hydra_tune.planning.rehearsal import Rehearsal

STEP_SECONDS = 0.0002
"""What a step of a shard costs besides its work: attaching blocks, records."""
TRANSFER_SHARE = 0.1
"""Of the budget, for the shard that is brought in while another one computes."""
SLOTS = 2
"""The spill store keeps a block's last commit beside the newest."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a strategy would take, or why it is refused."""

    strategy: str
    seconds: float = math.inf
    """Of an epoch."""
    work: float = math.inf
    """Seconds of an epoch, summed over devices."""
    batch_seconds: float = math.inf
    """Of a training batch."""
    device_bytes: int = 0
    """On the device that holds most, at its peak."""
    held_bytes: int = 0
    """What stays there between two units."""
    needed_bytes: int = 0
    """Of a strategy that spills: with how much it can do."""
    host_bytes: int = 0
    disk_bytes: int = 0
    moved_bytes: int = 0
    """Of an epoch."""
    devices: int = 1
    """How many it uses at the same time."""
    parts: int = 1
    """Shards, stages, replicas, subnets or clients."""
    refused: str = ""
    smallest_budget: int | None = None
    """Of a refusal for lack of memory: the device_memory that would do."""

    def scaled(self, factor: float) -> Estimate:
        """The same, so many times slower."""
        seconds, work, batch = (factor * each for each in (self.seconds, self.work, self.batch_seconds))
        return replace(self, seconds=seconds, work=work, batch_seconds=batch)

    def at_pace(self, batch_seconds: float) -> Estimate:
        """The same, with batches that take so long."""
        return self.scaled(batch_seconds / self.batch_seconds) if 0 < self.batch_seconds < math.inf else self


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """How much there is to do in an epoch."""

    batches: int
    valid_batches: int = 0
    rows: int = 0
    """Of a batch."""
    valid_rows: int = 0
    """Of all validation batches together."""


def refused(strategy: str, why: str, *, smallest_budget: int | None = None) -> Estimate:
    """A strategy that cannot train the candidate here."""
    return Estimate(strategy=strategy, refused=why, smallest_budget=smallest_budget)


def whole(found: Rehearsal, epoch: Epoch, pool: Pool) -> Estimate:
    """On one device, as a plain loop."""
    if found.peak_bytes > pool.memory:
        return refused(
            "whole", f"needs {format_bytes(found.peak_bytes)} on a device of {format_bytes(pool.memory)}",
            smallest_budget=-(-found.peak_bytes // 2**20) * 2**20,
        )  # fmt: skip
    seconds = epoch.batches * found.batch_seconds + epoch.valid_batches * found.judge_seconds
    return Estimate(
        strategy="whole", seconds=seconds, work=seconds, batch_seconds=found.batch_seconds,
        device_bytes=found.peak_bytes, held_bytes=found.state_bytes, host_bytes=found.peak_bytes if pool.cpu else 0,
    )  # fmt: skip


def shard(
    shards: Sequence[ShardCost], recomputed: Sequence[int], epoch: Epoch, pool: Pool, rates: Rates, *,
    fetch_seconds: float, pace: float = 1.0,
) -> Estimate:  # fmt: skip
    """In shards that come and go; `pace` is what a plain loop takes of what the nodes take one by one."""
    forward = sum(cost.forward_seconds for cost in shards)
    compute = pace * (sum(cost.seconds for cost in shards) + sum(shards[i].forward_seconds for i in recomputed))
    read, written = traffic(shards, recomputed, pool.memory)
    store = store_bytes(shards, recomputed)
    in_host = min(store, max(0, pool.host_bytes - (pool.devices * pool.memory if pool.cpu else 0)))
    on_disk = store - in_host
    share = in_host / store if store else 1.0
    copying = read / _mixed(rates.host_read, rates.disk_read, share)
    copying += written / _mixed(rates.host_write, rates.disk_write, share)
    # On cores of their own, copies hide behind the work; else they take its time.
    steps = 2 * len(shards) * STEP_SECONDS
    batch = fetch_seconds + steps + (max(compute, copying) if pool.spare_cores else compute + copying)
    weights = sum(cost.parameter_bytes for cost in shards) if len(shards) > 1 else 0
    judging = pace * forward * (epoch.valid_rows / max(epoch.rows, 1))
    judging += epoch.valid_batches * (fetch_seconds + len(shards) * STEP_SECONDS + weights / rates.host_read)
    seconds = epoch.batches * batch + judging
    device = min(pool.memory, held_on_device(shards, recomputed))
    return Estimate(
        strategy="shard", seconds=seconds, work=seconds, batch_seconds=batch, device_bytes=device,
        needed_bytes=min(pool.memory, round(max(cost.device_bytes for cost in shards) / (1 - TRANSFER_SHARE))),
        host_bytes=in_host + (device if pool.cpu else 0), disk_bytes=on_disk,
        moved_bytes=epoch.batches * (read + written) + epoch.valid_batches * weights, parts=len(shards),
    )  # fmt: skip


def traffic(shards: Sequence[ShardCost], recomputed: Sequence[int], budget: int) -> tuple[int, int]:
    """Bytes that a batch brings in and writes out; what stays on the device is not moved.

    Forward needs the weights, backward weights, optimizer state and what the forward kept. What is left of the budget
    beside the largest shard keeps that much at both turning points, from forward to backward and to the next batch.
    """
    state = sum(cost.state_bytes for cost in shards)
    weights = sum(cost.parameter_bytes + cost.buffer_bytes for cost in shards)
    kept = sum(cost.activation_bytes for i, cost in enumerate(shards[:-1]) if i not in recomputed)
    spare = max(0, budget - max(cost.device_bytes for cost in shards))
    if state + kept <= spare + max(cost.state_bytes for cost in shards):
        return 0, 0
    read = weights + state + kept - min(spare, weights) - min(spare, state)
    written = state + kept - min(spare, state + kept)
    return max(0, read), max(0, written)


def store_bytes(shards: Sequence[ShardCost], recomputed: Sequence[int]) -> int:
    """What a trial takes in the spill store at the most."""
    state = sum(cost.state_bytes for cost in shards)
    kept = sum(cost.activation_bytes for i, cost in enumerate(shards[:-1]) if i not in recomputed)
    return SLOTS * state + (kept if len(shards) > 1 else 0)


def held_on_device(shards: Sequence[ShardCost], recomputed: Sequence[int]) -> int:
    """What a device would hold if it had room for everything."""
    state = sum(cost.state_bytes for cost in shards)
    kept = sum(cost.activation_bytes for i, cost in enumerate(shards) if i not in recomputed)
    return state + kept + max(cost.device_bytes - cost.state_bytes - cost.activation_bytes for cost in shards)


@dataclass(frozen=True, kw_only=True)
class StagedCosts:
    """A pipeline as it was laid out for a pool."""

    step_seconds: float
    """Of a batch in all its micro-batches, with the optimizer's step."""
    busy_seconds: float
    """The same, summed over devices."""
    forward_seconds: float
    """Of a micro-batch through all stages."""
    microbatches: int
    stages: int
    device_bytes: int
    boundary_bytes: int
    """That a micro-batch sends from device to device, in its forward."""


def pipeline(staged: StagedCosts, epoch: Epoch, pool: Pool, *, fetch_seconds: float) -> Estimate:
    """In stages on all devices; the next batch is made while the last one is in the stages."""
    batch = max(staged.step_seconds, fetch_seconds)
    forward = staged.forward_seconds * staged.microbatches * (epoch.valid_rows / max(epoch.rows, 1))
    seconds = epoch.batches * batch + forward / pool.devices + epoch.valid_batches * fetch_seconds
    sent = 2 * staged.boundary_bytes * staged.microbatches
    return Estimate(
        strategy="pipeline", seconds=seconds, work=epoch.batches * (staged.busy_seconds + fetch_seconds) + forward,
        batch_seconds=batch, device_bytes=staged.device_bytes, held_bytes=staged.device_bytes,
        # What is handed over lies in the host's memory, a place for each value of each micro-batch.
        host_bytes=sent + (pool.devices * staged.device_bytes if pool.cpu else 0), devices=pool.devices,
        parts=staged.stages, moved_bytes=epoch.batches * sent,
    )  # fmt: skip


def _mixed(fast: float, slow: float, share: float) -> float:
    """The rate of bytes of which `share` goes the fast way."""
    return 1 / (share / fast + (1 - share) / slow)
