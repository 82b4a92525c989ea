"""Estimate for strategy `sparse`: as replicas, or the number of stages it would need.

Rougher than the estimates of exact strategies: it scales a plain loop by the formulas of the paper and adds
communication at the speed of a memory copy.
"""

from __future__ import annotations

from hydra_tune.strategies.estimate import PIECE_SECONDS, Epoch, Estimate, Look, Rehearsal, refused
from hydra_tune.strategies.pool import Pool, Rates
from hydra_tune.strategies.sparse.sizes import layers_of, stages_needed

SPARSITY = 0.9


def estimate(look: Look, pool: Pool) -> Estimate:
    """Estimate replicas if a device holds the dense network; otherwise refuse with the number of stages needed."""
    if look.rehearsal is not None and look.rehearsal.peak_bytes <= pool.memory:
        return from_rehearsal(look.rehearsal, look.parameter_bytes, look.epoch, pool, look.rates)
    candidate = look.prepared.candidate
    layers = layers_of(candidate.model, SPARSITY if candidate.sparsity is None else candidate.sparsity)
    needed = stages_needed(look.prospect, layers, pool.memory, mixed=True, microbatches=1)
    return refused("sparse", instead_of_replicas(needed.pruned, needed.dense, pool))


def from_rehearsal(found: Rehearsal, parameter_bytes: int, epoch: Epoch, pool: Pool, rates: Rates) -> Estimate:
    """Estimate a replica per device, with 90% of the weights pruned (arXiv 2302.05045) after dense epochs."""
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
    """Return the refusal for a network too large for a dense replica, which the first epochs need."""
    if pruned is None:
        return "no device holds a replica, nor any stage of it; `shards: true` may do"
    stages = f"{pruned} stage{'s' if pruned > 1 else ''}"
    against = "no number of stages holds dense" if dense is None else f"dense would need {dense}"
    if pruned > pool.devices:
        return f"no device holds a replica; pruned, it takes {stages} ({against}), and there are {pool.devices} devices"
    return f"no device holds a replica; ask for `stages: auto`: it takes {stages}, {against}"
