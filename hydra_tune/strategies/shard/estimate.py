"""Estimates a candidate's seconds and bytes in shards, from its shards' costs and the bytes that are moved."""

from __future__ import annotations

from collections.abc import Sequence

from hydra_tune.core.errors import Infeasible
from hydra_tune.graph.costs import ShardCost
from hydra_tune.strategies.estimate import Epoch, Estimate, Look, refused
from hydra_tune.strategies.pool import Pool, Rates

STEP_SECONDS = 0.0002
"""Seconds that a step of a shard takes besides its work, for attaching blocks and records."""
TRANSFER_SHARE = 0.1
"""Share of the budget kept free for the shard that is brought in while another one computes."""
SLOTS = 2
"""Copies of a block in the spill store: the last commit's, and the newest."""


def estimate(look: Look, pool: Pool) -> Estimate:
    """Return the estimate for the shards that the model would be cut into for this pool."""
    try:
        costs = look.observed.shards(pool.memory)
    except Infeasible as error:
        return refused("shard", str(error), smallest_budget=error.smallest_budget)
    nodes = sum(node.seconds for node in look.observed.profile.nodes)
    pace = 1.0
    if look.rehearsal is not None and nodes:
        pace = min(1.0, max(0.1, (look.rehearsal.batch_seconds - look.fetch_seconds) / nodes))
    return from_costs(costs, look.epoch, pool, look.rates, fetch_seconds=look.fetch_seconds, pace=pace)


def from_costs(
    shards: Sequence[ShardCost], epoch: Epoch, pool: Pool, rates: Rates, *,
    fetch_seconds: float, pace: float = 1.0,
) -> Estimate:  # fmt: skip
    """Return the estimate from shard costs.

    `pace` is a plain loop's time divided by the sum of the nodes' times.
    """
    forward = sum(cost.forward_seconds for cost in shards)
    compute = pace * sum(cost.seconds for cost in shards)
    read, written = traffic(shards, pool.memory)
    store = store_bytes(shards)
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
    device = min(pool.memory, held_on_device(shards))
    return Estimate(
        strategy="shard", seconds=seconds, work=seconds, batch_seconds=batch, device_bytes=device,
        needed_bytes=min(pool.memory, round(max(cost.device_bytes for cost in shards) / (1 - TRANSFER_SHARE))),
        host_bytes=in_host + (device if pool.cpu else 0), disk_bytes=on_disk,
        moved_bytes=epoch.batches * (read + written) + epoch.valid_batches * weights, parts=len(shards),
    )  # fmt: skip


def traffic(shards: Sequence[ShardCost], budget: int) -> tuple[int, int]:
    """Return the bytes that a batch brings in and writes out; blocks that stay on the device are not moved.

    The forward needs the weights; the backward needs weights, optimizer state and saved activations. The budget left
    beside the largest shard keeps blocks on the device twice a batch: from forward to backward, and to the next batch.
    """
    state = sum(cost.state_bytes for cost in shards)
    weights = sum(cost.parameter_bytes + cost.buffer_bytes for cost in shards)
    kept = sum(cost.activation_bytes for cost in shards[:-1])
    spare = max(0, budget - max(cost.device_bytes for cost in shards))
    if state + kept <= spare + max(cost.state_bytes for cost in shards):
        return 0, 0
    read = weights + state + kept - min(spare, weights) - min(spare, state)
    written = state + kept - min(spare, state + kept)
    return max(0, read), max(0, written)


def store_bytes(shards: Sequence[ShardCost]) -> int:
    """Return the most bytes that a trial takes in the spill store."""
    state = sum(cost.state_bytes for cost in shards)
    kept = sum(cost.activation_bytes for cost in shards[:-1])
    return SLOTS * state + (kept if len(shards) > 1 else 0)


def held_on_device(shards: Sequence[ShardCost]) -> int:
    """Return the bytes that a device would hold if it had room for everything."""
    state = sum(cost.state_bytes for cost in shards)
    kept = sum(cost.activation_bytes for cost in shards)
    return state + kept + max(cost.device_bytes - cost.state_bytes - cost.activation_bytes for cost in shards)


def _mixed(fast: float, slow: float, share: float) -> float:
    """Return the mean bytes per second if `share` of the bytes move at the rate `fast` and the rest at `slow`."""
    return 1 / (share / fast + (1 - share) / slow)
