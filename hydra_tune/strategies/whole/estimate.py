"""Estimate for strategy `whole`, from a rehearsal of a few training batches."""

from __future__ import annotations

from hydra_tune.core.devices import format_bytes
from hydra_tune.strategies.estimate import Epoch, Estimate, Look, Rehearsal, refused
from hydra_tune.strategies.pool import Pool

STATE_SHARE = 2
"""Training needs at least this many times the bytes of the parameters: weights and gradients."""


def estimate(look: Look, pool: Pool) -> Estimate:
    """Estimate from the rehearsal; without one, refuse a model that is too large for a device."""
    if look.failed:
        return refused("whole", f"its rehearsal failed ({look.failed})")
    if look.rehearsal is None:
        least, there = format_bytes(STATE_SHARE * look.parameter_bytes), format_bytes(pool.memory)
        return refused("whole", f"needs at least {least} on a device of {there}")
    return from_rehearsal(look.rehearsal, look.epoch, pool)


def from_rehearsal(found: Rehearsal, epoch: Epoch, pool: Pool) -> Estimate:
    """Estimate a plain loop on one device."""
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
