"""What runs in the builder for a pruned trial in stages or shards: finding its mask, laying it out, cutting it.

The builder holds a candidate as a whole, in host memory, whenever it looks at its weights. Where a mask is to be
searched for, the trial is first trained dense, in shards, which fit any device; the builder looks at the weights after
each epoch, and once the mask is found the network is pruned and taken apart anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hydra_tune.builds import Prepared
from hydra_tune.devices import format_bytes
from hydra_tune.engine.worker import WorkerContext
from hydra_tune.graph.placement import PlacementInfeasible
from hydra_tune.graph.placement.links import link
from hydra_tune.pipeline.microbatches import microbatches_for
from hydra_tune.pipeline.prepare import fewest_devices, lay_out, make_kit
from hydra_tune.shards.prepare import Prospect, examine, examine_mixed, hollow, with_evaluation
from hydra_tune.sparse.blocks import PrunedForm, block_state, layers_left
from hydra_tune.sparse.pruning import Pruning
from hydra_tune.sparse.sizes import compressed
from hydra_tune.sparse.staged import Compressed
from hydra_tune.sparse.training import SparseTraining
from hydra_tune.strategies.pipeline_units import DoesNotFit, LaidDown, Staged, judged_once, lay_down
from hydra_tune.strategies.shard_units import Cut, Cuttable, TooLarge, cut_up
from hydra_tune.strategies.whole import restore
from hydra_tune.training import Training, named_tensors

ORDER = "1f1b"


@dataclass(frozen=True)
class Wanted:
    """What the user wants of a network in stages, and what the devices have."""

    stages: int | None
    """None: as few as there need be."""
    microbatches: int | None
    devices: int
    room: int
    """Of each device, for this trial."""


@dataclass(frozen=True)
class Remains:
    """What is left of a network that was pruned."""

    pruned: int
    survivors: int


@dataclass(frozen=True)
class Begun:
    """How a trial begins: with a mask that is known, or dense, in shards, until it is found."""

    dense: Cut | None
    history: list[dict[str, float]]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class PrunedStaged:
    """A pruned trial in stages."""

    staged: Staged
    remains: Remains
    devices: int
    needed: int | None
    dense_needed: int | None
    """Devices that the same model needs with strategy `pipeline`."""


@dataclass(frozen=True)
class PrunedCut:
    """A pruned trial in shards."""

    cut: Cut
    remains: Remains
    weight_bytes: int
    """Of the weights that it computes with: dense, and in mixed precision most of them in 16 bits."""
    state_bytes: int
    """Of all its blocks."""


@dataclass
class _Whole:
    """A trial in the builder: the network as a whole, between two ways of taking it apart."""

    prepared: Prepared
    pruning: Pruning
    seed: int
    number: int
    profiles: Path
    staging: Wanted | None
    microbatches: int
    warning: str
    judged_at_random: bool
    dense: Prospect
    """The dense network's costs: for a micro-batch in stages, else for a batch."""
    training: SparseTraining

    def close(self) -> None:
        self.training.weights.let_go()


@dataclass
class _Dense(Cuttable):
    """A trial in the builder while it trains dense, in shards, and its mask is searched for."""

    whole: _Whole


def begin(
    context: WorkerContext, attempt: str, number: int, seed: int, pruning: Pruning, staging: Wanted | None, budget: int,
    checkpoints: Path, profiles: Path,
) -> Begun:  # fmt: skip
    """Take up the candidate that was built here; where its mask is to be searched for, cut it for dense training."""
    prepared: Prepared = context.resident[attempt]
    plain = Training(prepared.candidate, prepared.train, prepared.valid, seed, torch.device("cpu"))
    count, warning, rows = 1, "", None
    if staging is not None:
        count, warning = microbatches_for(plain, staging.microbatches, staging.stages or staging.devices)
        rows = -(-plain.batches.rows_at(0) // count)
    at_random, metric_bytes = judged_once(plain)
    dense = with_evaluation(examine(plain, profiles, rows), plain, rows, metric_bytes)
    in_batches = dense if rows is None or pruning.mask != "early-bird" else examine(plain, profiles)
    training = SparseTraining(prepared, seed, torch.device("cpu"), pruning, 0, 1)
    loaded = restore(training, checkpoints)
    whole = _Whole(prepared, pruning, seed, number, profiles, staging, count, warning, at_random, dense, training)
    context.resident[attempt] = whole
    if training.search is None:
        return Begun(None, loaded.history, loaded.notes)
    form, state = PrunedForm.of(training), block_state(training)
    training.weights.let_go()
    try:
        cut = cut_up(context, attempt, number, in_batches, prepared, state, seed, budget, form, loaded.notes)
    except TooLarge as error:
        raise TooLarge(f"in the dense epochs of mask early-bird, {error}; mask: magnitude has none") from error
    shards: Cuttable = context.resident[attempt]
    context.resident[attempt] = _Dense(**vars(shards), whole=whole)
    return Begun(cut, loaded.history, loaded.notes)


def look(context: WorkerContext, attempt: str) -> bool:
    """After a dense epoch: prune the network where its mask has settled or the time for it is up; whether it was."""
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
    hollow(model)
    return False


def stage(context: WorkerContext, attempt: str) -> PrunedStaged:
    """Lay the pruned network out over as many devices as are wanted, or as it needs, and write each one's share."""
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


def _too_few(wanted: Wanted, needed: int | None) -> str:
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
    """The network's state in blocks, and what it costs."""
    training = whole.training
    form, state, layers = PrunedForm.of(training), block_state(training), layers_left(training)
    training.weights.let_go()
    mixed = training.weights.mixed
    rows = None if whole.staging is None else -(-training.batches.rows_at(0) // whole.microbatches)
    measured = examine_mixed(whole.dense, training, whole.profiles, rows) if mixed else whole.dense
    remains = Remains(
        sum(layer.weights for layer in layers.values()), sum(layer.survivors for layer in layers.values())
    )
    state_of_dense = whole.dense.profile.state
    costs = compressed(measured, layers, mixed=mixed, resident=resident, dense=state_of_dense)
    return form, state, remains, costs
