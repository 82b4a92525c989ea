"""Builder units of a pruned trial in stages or shards: find its mask, lay it out, cut it.

The builder holds the whole candidate in host memory while it inspects the weights. If a mask must be searched for, the
trial first trains dense, in shards, which fit any device; the builder inspects the weights after each epoch, and once
the mask is found the network is pruned and divided again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hydra_tune.core.devices import format_bytes
from hydra_tune.engine.worker import WorkerContext
from hydra_tune.graph.placement import PlacementInfeasible
from hydra_tune.graph.placement.links import link
from hydra_tune.strategies.pipeline.microbatches import microbatches_for, why_not_apart
from hydra_tune.strategies.pipeline.prepare import fewest_devices, lay_out, make_kit
from hydra_tune.strategies.pipeline.units import DoesNotFit, LaidDown, judged_once, lay_down
from hydra_tune.strategies.shard.prepare import (
    Prospect,
    examine,
    examine_mixed,
    observe_candidate,
    with_evaluation,
)
from hydra_tune.strategies.shard.skeleton import empty_parameters
from hydra_tune.strategies.shard.units import Cuttable, ShardsTooLarge, cut_up
from hydra_tune.strategies.sparse.blocks import PrunedForm, block_state, layers_left
from hydra_tune.strategies.sparse.pruned_trial import ORDER, Begun, PrunedCut, PrunedStaged, Remains, StagingRequest
from hydra_tune.strategies.sparse.pruning import Pruning
from hydra_tune.strategies.sparse.sizes import compressed
from hydra_tune.strategies.sparse.stage_parameters import Compressed
from hydra_tune.strategies.sparse.training import SparseTraining
from hydra_tune.strategies.whole.units import restore
from hydra_tune.training.loop import Training, named_tensors
from hydra_tune.training.prepared import Prepared


@dataclass
class _Whole:
    """A trial in the builder: the whole network, before it is divided into stages or shards."""

    prepared: Prepared
    pruning: Pruning
    seed: int
    number: int
    profiles: Path
    staging: StagingRequest | None
    microbatches: int
    warning: str
    judged_at_random: bool
    dense: Prospect
    """Costs of the dense network: per micro-batch in stages, otherwise per batch."""
    training: SparseTraining

    def close(self) -> None:
        self.training.weights.let_go()


@dataclass
class _Dense(Cuttable):
    """A trial in the builder that trains dense, in shards, while its mask is searched for."""

    whole: _Whole


def why_one_replica(context: WorkerContext, attempt: str, seed: int, replicas: int) -> str:
    """Say why a candidate that waits here cannot have its batches divided among replicas; empty where it can."""
    prepared: Prepared = context.resident[attempt]
    training = Training(prepared.candidate, prepared.train, prepared.valid, seed, torch.device("cpu"))
    return why_not_apart(training, replicas)


def begin(
    context: WorkerContext, attempt: str, number: int, seed: int, pruning: Pruning, staging: StagingRequest | None,
    budget: int, checkpoints: Path, profiles: Path,
) -> Begun:  # fmt: skip
    """Load the candidate built in this worker; if its mask must be searched for, cut it for dense training."""
    prepared: Prepared = context.resident[attempt]
    plain = Training(prepared.candidate, prepared.train, prepared.valid, seed, torch.device("cpu"))
    count, warning, rows = 1, "", None
    if staging is not None:
        count, warning = microbatches_for(plain, staging.microbatches, staging.stages or staging.devices)
        rows = -(-plain.batches.rows_at(0) // count)
    at_random, metric_bytes = judged_once(plain)
    in_shards = staging is None or pruning.mask == "early-bird"
    in_batches = observe_candidate(plain, profiles) if in_shards else None
    staged = None if staging is None else with_evaluation(examine(plain, profiles, rows), plain, rows, metric_bytes)
    dense = staged or in_batches
    assert dense is not None
    training = SparseTraining(prepared, seed, torch.device("cpu"), pruning, 0, 1)
    loaded = restore(training, checkpoints)
    whole = _Whole(prepared, pruning, seed, number, profiles, staging, count, warning, at_random, dense, training)
    context.resident[attempt] = whole
    if training.search is None:
        return Begun(None, loaded.history, loaded.notes)
    assert in_batches is not None
    form, state = PrunedForm.of(training), block_state(training)
    training.weights.let_go()
    try:
        cut = cut_up(context, attempt, number, in_batches, prepared, state, seed, budget, form, loaded.notes)
    except ShardsTooLarge as error:
        raise ShardsTooLarge(f"in the dense epochs of mask early-bird, {error}; mask: magnitude has none") from error
    shards: Cuttable = context.resident[attempt]
    context.resident[attempt] = _Dense(**vars(shards), whole=whole)
    return Begun(cut, loaded.history, loaded.notes)


def look(context: WorkerContext, attempt: str) -> bool:
    """After a dense epoch, prune the network if its mask has settled or the search is over; True if pruned."""
    held: _Dense = context.resident[attempt]
    whole, state = held.whole, held.state()
    model = whole.prepared.candidate.model
    own = named_tensors(model)
    for name, tensor in state["tensors"].items():
        own[name].data = tensor
    training = SparseTraining(whole.prepared, whole.seed, torch.device("cpu"), whole.pruning, 0, 1)
    training.restore(held.form.checkpoint(state))
    training.look_for_mask()
    if training.search is None:
        held.close()
        whole.training = training
        context.resident[attempt] = whole
        return True
    held.form = PrunedForm.of(training)
    training.weights.let_go()
    empty_parameters(model)
    return False


def stage(context: WorkerContext, attempt: str) -> PrunedStaged:
    """Lay out the pruned network on the wanted number of devices, or as few as it needs, and write each share."""
    whole: _Whole = context.resident[attempt]
    wanted, training = whole.staging, whole.training
    assert wanted is not None
    form, state, remains, prospect = _pruned(whole, resident=True)
    count = whole.microbatches
    needed, dense = (fewest_devices(each, wanted.room, count, ORDER) for each in (prospect, whole.dense))
    devices = wanted.stages or needed
    if devices is None or devices > wanted.devices:
        raise DoesNotFit(_too_few(wanted, needed))
    capacity = (wanted.room,) * devices
    way = link(whole.profiles, Path(context.setup.directory).parent).seconds
    try:
        layout = lay_out(prospect, devices, capacity, count, ORDER, "balanced", way)
    except PlacementInfeasible as error:
        raise DoesNotFit(f"{error}; {_too_few(wanted, needed)}") from error
    kit = make_kit(prospect, layout.stages, capacity, whole.prepared, training, Compressed)
    laid = LaidDown(kit, layout, state, count, (), whole.warning, whole.judged_at_random, form)
    return PrunedStaged(lay_down(context, attempt, whole.number, laid), remains, devices, needed, dense)


def _too_few(wanted: StagingRequest, needed: int | None) -> str:
    room = format_bytes(wanted.room)
    if needed is None:
        return f"the pruned network does not fit in stages of {room}, however many (use shards: true)"
    stages = f"{needed} stage{'s' if needed > 1 else ''}"
    there = f"stages is {wanted.stages}" if wanted.stages else f"there are {wanted.devices} devices"
    return f"the pruned network needs {stages} of {room}, and {there} (give more device_memory, or use shards: true)"


def cut(context: WorkerContext, attempt: str, budget: int) -> PrunedCut:
    """Cut the pruned network into shards that fit a device, and write them to the spill store."""
    whole: _Whole = context.resident[attempt]
    form, state, remains, prospect = _pruned(whole, resident=False)
    size = sum(p.numel() * p.element_size() for p in whole.training.model.parameters())
    made = cut_up(
        context, attempt, whole.number, prospect, whole.prepared, state, whole.seed, budget, form, (), "-pruned"
    )
    shards: Cuttable = context.resident[attempt]
    return PrunedCut(made, remains, size, shards.kit.plan.state_bytes)


def _pruned(whole: _Whole, *, resident: bool) -> tuple[PrunedForm, dict[str, Any], Remains, Prospect]:
    """Return the network's state in blocks, and its costs."""
    training = whole.training
    form, state, layers = PrunedForm.of(training), block_state(training), layers_left(training)
    training.weights.let_go()
    mixed = training.weights.mixed
    rows = None if whole.staging is None else -(-training.batches.rows_at(0) // whole.microbatches)
    measured = whole.dense
    if mixed and whole.staging is None:
        seen = observe_candidate(training, whole.profiles, mixed=True)
        measured = replace(measured, captured=seen.captured, profile=seen.profile)
    elif mixed:
        measured = examine_mixed(whole.dense, training, whole.profiles, rows)
    remains = Remains(
        sum(layer.weights for layer in layers.values()), sum(layer.survivors for layer in layers.values())
    )
    state_of_dense = whole.dense.profile.state
    costs = compressed(measured, layers, mixed=mixed, resident=resident, dense=state_of_dense)
    return form, state, remains, costs
