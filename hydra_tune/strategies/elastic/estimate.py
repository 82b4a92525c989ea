"""Estimate for strategy `elastic`: clients around a centre.

Rougher than the estimates of exact strategies: it scales a plain loop by the formulas of the paper and adds
communication at the speed of a memory copy.
"""

from __future__ import annotations

from hydra_tune.core.devices import format_bytes
from hydra_tune.strategies.estimate import PIECE_SECONDS, Epoch, Estimate, Look, Rehearsal, not_rehearsed, refused
from hydra_tune.strategies.pool import Pool, Rates

TAU = 10


def estimate(look: Look, pool: Pool) -> Estimate:
    """Estimate from the rehearsal of the whole candidate."""
    if look.rehearsal is None:
        return refused("elastic", not_rehearsed(look))
    return from_rehearsal(look.rehearsal, look.parameter_bytes, look.epoch, pool, look.rates)


def from_rehearsal(found: Rehearsal, parameter_bytes: int, epoch: Epoch, pool: Pool, rates: Rates) -> Estimate:
    """Estimate one client per device around a centre (arXiv 1801.03855): 2P bytes for each exchange."""
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
