"""Estimate for strategy `ist`, independent subnets.

Rougher than the estimates of exact strategies: it scales a plain loop by the formulas of the paper and adds
communication at the speed of a memory copy.
"""

from __future__ import annotations

from hydra_tune.core.devices import format_bytes
from hydra_tune.core.errors import CandidateError
from hydra_tune.core.trees import some_rows
from hydra_tune.strategies.estimate import PIECE_SECONDS, Epoch, Estimate, Look, Rehearsal, not_rehearsed, refused
from hydra_tune.strategies.pool import Pool, Rates
from hydra_tune.strategies.shard.prepare import PILOT_ROWS
from hydra_tune.strategies.subnets.deal import deal
from hydra_tune.strategies.subnets.find import find_structure
from hydra_tune.strategies.subnets.shrink import subnet

LOCAL_STEPS = 20


def estimate(look: Look, pool: Pool) -> Estimate:
    """Estimate from the rehearsal of the whole candidate, and the share of the model that a subnet has."""
    if look.rehearsal is None:
        return refused("ist", not_rehearsed(look))
    try:
        share = _subnet_share(look, max(2, pool.devices))
    except CandidateError as error:
        return refused("ist", str(error))
    return from_rehearsal(look.rehearsal, share, look.parameter_bytes, look.epoch, pool, look.rates)


def _subnet_share(look: Look, subnets: int) -> float:
    model = look.prepared.candidate.model
    if len(look.training.batches) < subnets:
        raise CandidateError(
            f"an epoch has {len(look.training.batches)} batches, fewer than {subnets} subnets", "use smaller ones"
        )
    inputs, _targets = look.training.batches.fetch(0, 0)
    pilot = some_rows(inputs, look.training.batches.rows_at(0), 0, PILOT_ROWS)
    structure = find_structure(model, pilot, subnets, "auto")
    tensors = look.training.named_tensors()
    parts = [subnet(model, structure, dealt, tensors) for dealt in deal(structure, subnets, seed=0, turn=0)]
    largest = max(sum(p.numel() for p in part.parameters()) for part in parts)
    return largest / max(1, sum(p.numel() for p in model.parameters()))


def from_rehearsal(
    found: Rehearsal, share: float, parameter_bytes: int, epoch: Epoch, pool: Pool, rates: Rates
) -> Estimate:  # fmt: skip
    """Estimate one subnet per device, at least two (arXiv 1910.02120); `share` is a subnet's share of the weights."""
    subnets = max(2, pool.devices)
    rounds = -(-epoch.batches // (subnets * LOCAL_STEPS))
    # Weights and optimizer state are sent with the neurons, both ways, for each subnet of each round.
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
