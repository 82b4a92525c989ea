"""Units of a pipelined trial: the builder lays it out, and each device runs its stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hydra_tune.core.random_state import RandomState
from hydra_tune.core.tensor_memory import TensorBytes
from hydra_tune.core.trees import call_model
from hydra_tune.core.weights import save_weights
from hydra_tune.engine.transfer import unpack
from hydra_tune.engine.unit import TrialEnded
from hydra_tune.engine.worker import WorkerContext
from hydra_tune.graph.capture import untouched
from hydra_tune.graph.placement import PlacementInfeasible
from hydra_tune.graph.placement.links import link
from hydra_tune.spill.places import remove_directory, write_whole
from hydra_tune.spill.store import SpillFiles
from hydra_tune.strategies.epochs import SavedCheckpoint
from hydra_tune.strategies.pipeline.kit import PipelineKit
from hydra_tune.strategies.pipeline.microbatches import microbatches_for
from hydra_tune.strategies.pipeline.part import Part
from hydra_tune.strategies.pipeline.prepare import PipelineLayout, files_of, lay_out, make_kit, merged, why_one_device
from hydra_tune.strategies.pipeline.staged import Evaluated, Fetched, Forwarded, PipelineRequest, Random, Sent, Staged
from hydra_tune.strategies.shard.checkpoint_forms import CheckpointForm
from hydra_tune.strategies.shard.exchange import put_together, take_apart
from hydra_tune.strategies.shard.prepare import examine, hollow, with_evaluation
from hydra_tune.strategies.whole.units import OutOfMemory, restore, write_checkpoint
from hydra_tune.training.batches import Batches
from hydra_tune.training.loop import Training, named_tensors
from hydra_tune.training.prepared import Prepared, pack_here

# In the builder


@dataclass
class _Laid:
    """A laid-out trial in the builder."""

    kit: PipelineKit
    files: list[SpillFiles]
    directory: Path
    form: CheckpointForm

    def close(self) -> None:
        for files in self.files:
            files.remove()
        remove_directory(self.directory)

    def state(self) -> dict[str, Any]:
        """Return the state of the whole trial, as last written by the devices."""
        return self.form.checkpoint(self._in_blocks())

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the final weights."""
        state = self._in_blocks()
        return self.form.weights(state["kept"], lambda: state["tensors"])

    def _in_blocks(self) -> dict[str, Any]:
        for files in self.files:
            files.reload()
        kit = self.kit
        return merged(
            put_together(files, held, kit.parts, kit.data) for files, held in zip(self.files, kit.held, strict=True)
        )


class DoesNotFit(TrialEnded):
    """The devices together have too little memory."""

    status = "OUT_OF_MEMORY"


def stage(
    context: WorkerContext, attempt: str, number: int, seed: int, wanted: PipelineRequest, checkpoints: Path,
    profiles: Path,
) -> Staged:  # fmt: skip
    """Lay out the candidate built in this worker, and write each device's share to its files."""
    prepared: Prepared = context.resident[attempt]
    training = Training(prepared.candidate, prepared.train, prepared.valid, seed, torch.device("cpu"))
    loaded = restore(training, checkpoints)
    devices = len(wanted.capacity)
    count, warning = microbatches_for(training, wanted.microbatches, devices)
    rows = -(-training.batches.rows_at(0) // count)
    prospect = examine(training, profiles, rows, beside=devices - 1 if wanted.on_cores else 0)
    judged_at_random, metric_bytes = judged_once(training)
    prospect = with_evaluation(prospect, training, rows, metric_bytes)
    way = link(profiles, Path(context.setup.directory).parent).seconds
    try:
        layout = lay_out(
            prospect, devices, wanted.capacity, count, wanted.order, wanted.placer, way, trials=wanted.trials
        )
    except PlacementInfeasible as error:
        raise DoesNotFit(f"{error} (train it in shards with --strategy shard)") from error
    kit = make_kit(prospect, layout.stages, wanted.capacity, prepared, training)
    warning = "; ".join(filter(None, (warning, why_one_device(prospect, layout))))
    laid = LaidDown(kit, layout, training.state(), count, loaded.notes, warning, judged_at_random)
    return lay_down(context, attempt, number, laid)


@dataclass(frozen=True)
class LaidDown:
    """The facts of a trial from which its devices' shares are written."""

    kit: PipelineKit
    layout: PipelineLayout
    state: dict[str, Any]
    microbatches: int
    notes: tuple[str, ...]
    warning: str
    judged_at_random: bool
    form: CheckpointForm = field(default_factory=CheckpointForm)


def lay_down(context: WorkerContext, attempt: str, number: int, laid: LaidDown) -> Staged:
    """Write each device's share and the kit to files; afterwards the model in this process is empty."""
    kit, state, layout = laid.kit, laid.state, laid.layout
    places = [Path(place) for place in (context.setup.directory, *context.setup.overflow)]
    name = f"trial-{number}-{attempt}"
    files = [files_of(places, name, device) for device in range(len(kit.held))]
    directory = places[0] / f"{name}-passing"
    context.resident[attempt] = _Laid(kit, files, directory, laid.form)  # from here on its files are removed with it
    for each, held in zip(files, kit.held, strict=True):
        take_apart(state, held, kit.parts, each)
    directory.mkdir()
    hollow(kit.candidate.model)
    path = directory / "kit"
    write_whole(path, pack_here(context, kit))
    valid = None if kit.valid is None else Batches(kit.candidate, kit.valid, training=False)
    return Staged(
        str(path), str(directory), tuple(map(str, places)), name, kit.program.inputs, layout.stages, layout.placer,
        layout.prediction.seconds, laid.microbatches, kit.draws, laid.judged_at_random, kit.data,
        () if valid is None else tuple(valid.rows_at(position) for position in range(len(valid))),
        state["position"], list(state["history"]), kit.candidate.clip_grad_norm, kit.candidate.accumulate, laid.notes,
        laid.warning, laid.form.between_steps,
    )  # fmt: skip


def judged_once(training: Training) -> tuple[bool, int]:
    """Evaluate the first batch: True if evaluation draws random numbers, and the peak bytes of loss and metrics."""
    if training.valid is None:
        return False, 0
    model, candidate = training.model, training.candidate
    inputs, targets = training.valid.fetch(0, 0)
    with untouched(model), torch.no_grad():
        model.eval()
        before = RandomState.capture()
        outputs = call_model(model, inputs)
        with TensorBytes() as counted:
            for judge_by in (candidate.loss, *candidate.metrics.values()):
                judge_by(outputs, targets)
        return not before.same_as(RandomState.capture()), counted.peak


def checkpoint(context: WorkerContext, attempt: str, directory: Path) -> SavedCheckpoint:
    """Write the state that the devices have collected as a checkpoint."""
    laid: _Laid = context.resident[attempt]
    state = laid.state()
    step = state["position"]["epoch"] * laid.kit.data[2] + state["position"]["batch"]
    return write_checkpoint(directory, step, lambda: state)


def save(context: WorkerContext, attempt: str, path: Path) -> None:
    """Write the final weights, from the state that the devices have collected."""
    laid: _Laid = context.resident[attempt]
    model = laid.kit.candidate.model
    own = named_tensors(model)
    for name, tensor in laid.weights().items():
        own[name].data = tensor.clone()  # safetensors wants each tensor in a storage of its own
    save_weights(model, path)
    hollow(model)


# On a device


def load(context: WorkerContext, attempt: str, staged: Staged, index: int) -> None:
    """Load this device's share."""
    kit: PipelineKit = unpack(Path(staged.kit).read_bytes())
    files = files_of([Path(place) for place in staged.places], staged.name, index)
    context.resident[attempt] = Part(kit, index, context.device, files, Path(staged.directory))


def fetch(context: WorkerContext, attempt: str, epoch: int, position: int, count: int, random: Random) -> Fetched:
    """Make a batch, divided into micro-batches."""
    part: Part = context.resident[attempt]
    return part.fetch(epoch, position, count, random)


def fetch_ahead(context: WorkerContext, attempt: str, epoch: int, position: int) -> None:
    """Make the next batch ahead of time."""
    part: Part = context.resident[attempt]
    part.fetch_ahead(epoch, position)


def forward(
    context: WorkerContext, attempt: str, stage: int, lane: int, arrived: Sent, weight: float, random: Random,
    in_halves: bool,
) -> Forwarded:  # fmt: skip
    """Run a stage's forward for one micro-batch."""
    part: Part = context.resident[attempt]
    with part.counting():
        done = part.forward(part.kit.stages[stage], lane, arrived, weight, random, in_halves=in_halves)
    _note_peak(context, part)
    return done


def backward(context: WorkerContext, attempt: str, stage: int, lane: int, arrived: list[tuple[int, Sent]]) -> Sent:
    """Run a stage's backward for one micro-batch."""
    part: Part = context.resident[attempt]
    with part.counting():
        sent = part.backward(part.kit.stages[stage], lane, arrived)
    _note_peak(context, part)
    return sent


def weights(context: WorkerContext, attempt: str, stage: int, lane: int) -> None:
    """Compute the deferred weight gradients of a stage."""
    part: Part = context.resident[attempt]
    with part.counting():
        part.weights(part.kit.stages[stage], lane)
    _note_peak(context, part)


def norms(context: WorkerContext, attempt: str) -> dict[str, float]:
    """Return the norm of each gradient on this device."""
    part: Part = context.resident[attempt]
    return part.share.parameters.norms()


def step(context: WorkerContext, attempt: str, factor: float | None) -> None:
    """End a batch; unless `factor` is None, run the optimizer's step."""
    part: Part = context.resident[attempt]
    part.end_batch()
    if factor is not None:
        part.step(factor)
    _note_peak(context, part)


def fetch_valid(context: WorkerContext, attempt: str, position: int, lane: int, random: Random) -> Fetched:
    """Make a validation batch."""
    part: Part = context.resident[attempt]
    return part.fetch_valid(position, lane, random)


def judge(context: WorkerContext, attempt: str, stage: int, lane: int, arrived: Sent, random: Random) -> Evaluated:
    """Run a stage's forward in evaluation."""
    part: Part = context.resident[attempt]
    with part.counting_judged(lane):
        judged = part.judge(part.kit.stages[stage], lane, arrived, random)
    _note_peak(context, part)
    return judged


def end_epoch(context: WorkerContext, attempt: str, loss: float) -> None:
    """End the epoch, whose evaluation gave this loss."""
    part: Part = context.resident[attempt]
    part.end_epoch(loss)


def keep_weights(context: WorkerContext, attempt: str) -> None:
    """Keep a copy of this device's current weights."""
    part: Part = context.resident[attempt]
    part.share.keep_weights()


def collect(
    context: WorkerContext, attempt: str, position: dict[str, Any], history: list[dict[str, float]], random: Random
) -> None:
    """Write this device's state to its files, for the builder."""
    part: Part = context.resident[attempt]
    part.share.collect(position, history, random)


def _note_peak(context: WorkerContext, part: Part) -> None:
    context.unit_peak_bytes = part.tensors.peak
    room = part.kit.capacity[part.index]
    if part.tensors.peak > room:
        raise OutOfMemory(part.tensors.peak, room, context.setup.device)
