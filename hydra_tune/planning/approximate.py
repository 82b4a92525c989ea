"""What the strategies that change the mathematics would take, from what a whole candidate takes.

Rougher than the estimates of exact strategies: they scale a plain loop by the formulas of the papers and add what is
communicated at the rate of a copy. They are asked for only where a user allows such strategies.
"""

from __future__ import annotations

from hydra_tune.devices import format_bytes
from hydra_tune.planning.estimates import Epoch, Estimate, refused
from hydra_tune.planning.pool import Pool, Rates
from hydra_tune.planning.rehearsal import Rehearsal

TAU = 10
LOCAL_STEPS = 20
SPARSITY = 0.9
PIECE_SECONDS = 0.05
"""To form a group of replicas, or to begin and end a phase."""


def elastic(found: Rehearsal, parameter_bytes: int, epoch: Epoch, pool: Pool, rates: Rates) -> Estimate:
    """One client a device around a centre (arXiv 1801.03855): 2P bytes for each exchange."""
    if pool.devices == 1:
        return refused("elastic", "there is one device, and clients share out several")
    if found.peak_bytes > pool.memory:
        return refused("elastic", f"a client needs {format_bytes(found.peak_bytes)} on a device, as `whole` does")
    exchanges = -(-epoch.batches // TAU)
    moved = 2 * parameter_bytes * exchanges
    work = epoch.batches * found.batch_seconds + exchanges * (PIECE_SECONDS + 2 * parameter_bytes / rates.copy)
    return Estimate(
        strategy="elastic", seconds=work / pool.devices + epoch.valid_batches * found.judge_seconds,
        work=work + epoch.valid_batches * found.judge_seconds, batch_seconds=work / epoch.batches / pool.devices,
        device_bytes=found.peak_bytes + parameter_bytes, held_bytes=found.state_bytes,
        host_bytes=(pool.devices * found.peak_bytes if pool.cpu else 0) + 2 * found.state_bytes, moved_bytes=moved,
        devices=pool.devices, parts=pool.devices,
    )  # fmt: skip


def ist(
    found: Rehearsal, share: float, parameter_bytes: int, epoch: Epoch, pool: Pool, rates: Rates
) -> Estimate:  # fmt: skip
    """A subnet a device, two at least (arXiv 1910.02120); `share` is the part of the weights that a subnet has."""
    subnets = max(2, pool.devices)
    rounds = -(-epoch.batches // (subnets * LOCAL_STEPS))
    # Weights and optimizer state travel with the neurons, there and back, for each subnet of each round.
    travels = share * found.state_bytes
    moved = round(2 * travels * subnets * rounds)
    work = epoch.batches * found.batch_seconds * share + rounds * subnets * PIECE_SECONDS + moved / rates.copy
    at_once = min(subnets, pool.devices)
    activations = max(0, found.peak_bytes - found.state_bytes)
    device = round(share * found.state_bytes + activations / subnets)
    if device > pool.memory:
        return refused("ist", f"a subnet needs {format_bytes(device)} on a device of {format_bytes(pool.memory)}")
    judging = epoch.valid_batches * found.judge_seconds
    return Estimate(
        strategy="ist", seconds=work / at_once + judging, work=work + judging,
        batch_seconds=work / epoch.batches / at_once, device_bytes=max(device, parameter_bytes), held_bytes=device,
        host_bytes=(at_once * device if pool.cpu else 0) + 2 * found.state_bytes, moved_bytes=moved, devices=at_once,
        parts=subnets,
    )  # fmt: skip


def sparse(found: Rehearsal, parameter_bytes: int, epoch: Epoch, pool: Pool, rates: Rates) -> Estimate:
    """A replica on each device, 90% of the weights pruned (arXiv 2302.05045) after dense epochs that find a mask."""
    survivors = (1 - SPARSITY) * parameter_bytes
    sent = 2 * survivors / 2 if pool.devices > 1 else 0.0
    pieces = max(1.0, epoch.batches * found.batch_seconds / pool.devices / 2)
    seconds = epoch.batches * (found.batch_seconds / pool.devices + sent / rates.copy) + pieces * PIECE_SECONDS
    judging = epoch.valid_batches * found.judge_seconds
    return Estimate(
        strategy="sparse", seconds=seconds + judging, work=seconds * pool.devices + judging,
        batch_seconds=seconds / epoch.batches, device_bytes=found.peak_bytes, held_bytes=found.state_bytes,
        host_bytes=(pool.devices * found.peak_bytes if pool.cpu else 0) + found.state_bytes,
        moved_bytes=round(sent * pool.devices * epoch.batches), devices=pool.devices, parts=pool.devices,
    )  # fmt: skip


def instead_of_replicas(pruned: int | None, dense: int | None, pool: Pool) -> str:
    """What a pruned network takes where no device holds a dense replica of it, which its first epochs need."""
    if pruned is None:
        return "no device holds a replica, nor any stage of it; `shards: true` may do"
    stages = f"{pruned} stage{'s' if pruned > 1 else ''}"
    against = "no number of stages holds dense" if dense is None else f"dense would need {dense}"
    if pruned > pool.devices:
        return f"no device holds a replica; pruned, it takes {stages} ({against}), and there are {pool.devices} devices"
    return f"no device holds a replica; ask for `stages: auto`: it takes {stages}, {against}"
