"""Estimate for strategy `pipeline`: lay the candidate out for the pool and simulate its schedule."""

from __future__ import annotations

from dataclasses import dataclass

from hydra_tune.core.errors import HydraTuneError
from hydra_tune.graph.placement.links import link
from hydra_tune.strategies.estimate import Epoch, Estimate, Look, refused
from hydra_tune.strategies.pipeline.microbatches import microbatches_for
from hydra_tune.strategies.pipeline.prepare import lay_out, most_on_a_device, why_uncut
from hydra_tune.strategies.pool import Pool
from hydra_tune.strategies.shard.prepare import examine, with_evaluation


def estimate(look: Look, pool: Pool) -> Estimate:
    """Estimate from the stages that the model would have on this pool."""
    if pool.devices == 1:
        return refused("pipeline", "there is one device, and stages need two or more")
    try:
        count, warning = microbatches_for(look.training, None, pool.devices)
        if count == 1:
            return refused("pipeline", f"only {warning or 'one row a batch'}; all devices but one would wait")
        staged = _staged(look, pool, count)
        if isinstance(staged, str):
            return refused("pipeline", staged)
    except HydraTuneError as error:  # no room on the devices, or a loss that cannot be divided
        return refused("pipeline", str(error))
    return from_stages(staged, look.epoch, pool, fetch_seconds=look.fetch_seconds)


def _staged(look: Look, pool: Pool, count: int) -> StagedCosts | str:
    """Return the costs, or the reason why the model cannot be cut."""
    rows = -(-look.training.batches.rows_at(0) // count)
    prospect = with_evaluation(examine(look.training, look.profiles, rows), look.training, rows)
    if why := why_uncut(prospect):
        return why
    way = link(look.profiles, look.directory.parent).seconds
    laid = lay_out(prospect, pool.devices, [pool.memory] * pool.devices, count, "1f1b", "best", way)
    made_on = {value: stage.device for stage in laid.stages for value in stage.gives}
    crossing = {
        (value, stage.device)
        for stage in laid.stages
        for value in stage.takes
        if made_on.get(value, stage.device) != stage.device
    }
    steps = sum(stage.step_seconds for stage in laid.stages)
    return StagedCosts(
        step_seconds=laid.prediction.seconds, busy_seconds=sum(laid.prediction.busy) + steps,
        forward_seconds=sum(stage.forward_seconds for stage in laid.stages), microbatches=count,
        stages=len(laid.stages), device_bytes=most_on_a_device(laid.stages, pool.devices, "1f1b", count),
        boundary_bytes=sum(prospect.profile.value_bytes.get(value, 0) for value, _ in crossing),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StagedCosts:
    """Costs of a pipeline laid out for a pool."""

    step_seconds: float
    """Seconds per batch in all its micro-batches, with the optimizer's step."""
    busy_seconds: float
    """Seconds per batch, summed over devices."""
    forward_seconds: float
    """Seconds of a micro-batch's forward through all stages."""
    microbatches: int
    stages: int
    device_bytes: int
    boundary_bytes: int
    """Bytes that a micro-batch's forward sends from device to device."""


def from_stages(staged: StagedCosts, epoch: Epoch, pool: Pool, *, fetch_seconds: float) -> Estimate:
    """Estimate training in stages on all devices; the next batch is made while the last one is in the stages."""
    batch = max(staged.step_seconds, fetch_seconds)
    forward = staged.forward_seconds * staged.microbatches * (epoch.valid_rows / max(epoch.rows, 1))
    seconds = epoch.batches * batch + forward / pool.devices + epoch.valid_batches * fetch_seconds
    sent = 2 * staged.boundary_bytes * staged.microbatches
    return Estimate(
        strategy="pipeline", seconds=seconds, work=epoch.batches * (staged.busy_seconds + fetch_seconds) + forward,
        batch_seconds=batch, device_bytes=staged.device_bytes, held_bytes=staged.device_bytes,
        # Passed values lie in host memory, in one place for each value of each micro-batch.
        host_bytes=sent + (pool.devices * staged.device_bytes if pool.cpu else 0), devices=pool.devices,
        parts=staged.stages, moved_bytes=epoch.batches * sent,
    )  # fmt: skip
