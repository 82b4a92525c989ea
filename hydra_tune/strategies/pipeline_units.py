"""What runs in workers for a trial in stages: the builder lays it out, and each device runs its stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hydra_tune.batches import Batches, call_model
from hydra_tune.builds import Prepared, pack_here
from hydra_tune.engine.memory import TensorBytes
from hydra_tune.engine.spill import SpillFiles, remove_directory, write_whole
from hydra_tune.engine.transfer import unpack
from hydra_tune.engine.unit import TrialEnded
from hydra_tune.engine.worker import WorkerContext
from hydra_tune.graph.capture import untouched
from hydra_tune.graph.placement import PlacementInfeasible
from hydra_tune.graph.placement.links import link
from hydra_tune.pipeline.kit import Fetched, Forwarded, Judged, PipelineKit, Random, Sent
from hydra_tune.pipeline.microbatches import microbatches_for
from hydra_tune.pipeline.part import Part
from hydra_tune.pipeline.prepare import LaidOut, files_of, lay_out, make_kit, merged
from hydra_tune.pipeline.stages import Stage
from hydra_tune.seeds import RandomState
from hydra_tune.shards.exchange import put_together, take_apart
from hydra_tune.shards.forms import Form
from hydra_tune.shards.prepare import examine, hollow, with_evaluation
from hydra_tune.strategies.epochs import Saved
from hydra_tune.strategies.whole import OutOfMemory, restore, write_checkpoint
from hydra_tune.training import Training, named_tensors
from hydra_tune.weights import save_weights


@dataclass(frozen=True)
class Wanted:
    """What the user wants of a pipeline, and what the devices have."""

    microbatches: int | None
    placer: str
    order: str
    capacity: tuple[int, ...]
    trials: int
    """That are on the devices at the same time."""
    on_cores: bool = True
    """Whether the devices are cores of this machine, which disturb each other when all are at work."""


@dataclass(frozen=True)
class Staged:
    """A trial that is laid out: where its devices find it, and where it stands."""

    kit: str
    directory: str
    places: tuple[str, ...]
    name: str
    inputs: tuple[str, ...]
    """The model's arguments that a batch gives: the first values."""
    stages: tuple[Stage, ...]
    placer: str
    predicted_seconds: float
    microbatches: int
    draws: bool
    judged_at_random: bool
    """Whether evaluation draws random numbers too: its batches then go one by one, as in a plain loop."""
    data: tuple[int, int, int]
    valid_rows: tuple[int, ...]
    position: dict[str, Any]
    history: list[dict[str, float]]
    clip_grad_norm: float | None
    accumulate: int
    notes: tuple[str, ...]
    warning: str
    between_steps: bool
    """Whether training pauses between steps only: there is no place for gradients that wait for one."""


# In the builder


@dataclass
class _Laid:
    """A trial in the builder."""

    kit: PipelineKit
    files: list[SpillFiles]
    directory: Path
    form: Form

    def close(self) -> None:
        for files in self.files:
            files.remove()
        remove_directory(self.directory)

    def state(self) -> dict[str, Any]:
        """The whole trial's state, as the devices wrote it last."""
        return self.form.checkpoint(self._in_blocks())

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights to keep."""
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
    """The devices together have not the memory."""

    status = "OUT_OF_MEMORY"


def stage(
    context: WorkerContext, attempt: str, number: int, seed: int, wanted: Wanted, checkpoints: Path, profiles: Path
) -> Staged:  # fmt: skip
    """Lay out the candidate that was built here, and write each device's share where it finds it."""
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
    laid = LaidDown(kit, layout, training.state(), count, loaded.notes, warning, judged_at_random)
    return lay_down(context, attempt, number, laid)


@dataclass(frozen=True)
class LaidDown:
    """All that is known of a trial when its devices get their shares."""

    kit: PipelineKit
    layout: LaidOut
    state: dict[str, Any]
    microbatches: int
    notes: tuple[str, ...]
    warning: str
    judged_at_random: bool
    form: Form = field(default_factory=Form)


def lay_down(context: WorkerContext, attempt: str, number: int, laid: LaidDown) -> Staged:
    """Write each device's share and the kit where workers find them; the model here is a skeleton from now on."""
    kit, state, layout = laid.kit, laid.state, laid.layout
    places = [Path(place) for place in (context.setup.directory, *context.setup.overflow)]
    name = f"trial-{number}-{attempt}"
    files = [files_of(places, name, device) for device in range(len(kit.held))]
    directory = places[0] / f"{name}-passing"
    context.resident[attempt] = _Laid(kit, files, directory, laid.form)  # from here on its files go with it
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
    """Whether model, loss or metrics draw random numbers in evaluation, and what loss and metrics take for a moment; by
    the first batch."""
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


def checkpoint(context: WorkerContext, attempt: str, directory: Path) -> Saved:
    """Write what the devices have collected as a checkpoint."""
    laid: _Laid = context.resident[attempt]
    state = laid.state()
    step = state["position"]["epoch"] * laid.kit.data[2] + state["position"]["batch"]
    return write_checkpoint(directory, step, lambda: state)


def save(context: WorkerContext, attempt: str, path: Path) -> None:
    """Write the weights to keep, from what the devices have collected."""
    laid: _Laid = context.resident[attempt]
    model = laid.kit.candidate.model
    own = named_tensors(model)
    for name, tensor in laid.weights().items():
        own[name].data = tensor.clone()  # safetensors wants each tensor in a storage of its own
    save_weights(model, path)
    hollow(model)


# On a device


def load(context: WorkerContext, attempt: str, staged: Staged, index: int) -> None:
    """Take up this device's share."""
    kit: PipelineKit = unpack(Path(staged.kit).read_bytes())
    files = files_of([Path(place) for place in staged.places], staged.name, index)
    context.resident[attempt] = Part(kit, index, context.device, files, Path(staged.directory))


def fetch(context: WorkerContext, attempt: str, epoch: int, position: int, count: int, random: Random) -> Fetched:
    """Make a batch, in micro-batches."""
    part: Part = context.resident[attempt]
    return part.fetch(epoch, position, count, random)


def fetch_ahead(context: WorkerContext, attempt: str, epoch: int, position: int) -> None:
    """Make the batch that comes next."""
    part: Part = context.resident[attempt]
    part.fetch_ahead(epoch, position)


def forward(
    context: WorkerContext, attempt: str, stage: int, lane: int, arrived: Sent, weight: float, random: Random,
    in_halves: bool,
) -> Forwarded:  # fmt: skip
    """A stage's forward for one micro-batch."""
    part: Part = context.resident[attempt]
    with part.counting():
        done = part.forward(part.kit.stages[stage], lane, arrived, weight, random, in_halves=in_halves)
    _note_peak(context, part)
    return done


def backward(context: WorkerContext, attempt: str, stage: int, lane: int, arrived: list[tuple[int, Sent]]) -> Sent:
    """A stage's backward for one micro-batch."""
    part: Part = context.resident[attempt]
    with part.counting():
        sent = part.backward(part.kit.stages[stage], lane, arrived)
    _note_peak(context, part)
    return sent


def weights(context: WorkerContext, attempt: str, stage: int, lane: int) -> None:
    """The gradients of a stage's weights that were left for later."""
    part: Part = context.resident[attempt]
    with part.counting():
        part.weights(part.kit.stages[stage], lane)
    _note_peak(context, part)


def norms(context: WorkerContext, attempt: str) -> dict[str, float]:
    """The norms of the gradients here."""
    part: Part = context.resident[attempt]
    return part.share.parameters.norms()


def step(context: WorkerContext, attempt: str, factor: float | None) -> None:
    """The end of a batch, with the optimizer's step where it is due."""
    part: Part = context.resident[attempt]
    part.end_batch()
    if factor is not None:
        part.step(factor)
    _note_peak(context, part)


def fetch_valid(context: WorkerContext, attempt: str, position: int, lane: int, random: Random) -> Fetched:
    """Make a batch of the validation data."""
    part: Part = context.resident[attempt]
    return part.fetch_valid(position, lane, random)


def judge(context: WorkerContext, attempt: str, stage: int, lane: int, arrived: Sent, random: Random) -> Judged:
    """A stage's forward in evaluation."""
    part: Part = context.resident[attempt]
    with part.counting_judged(lane):
        judged = part.judge(part.kit.stages[stage], lane, arrived, random)
    _note_peak(context, part)
    return judged


def end_epoch(context: WorkerContext, attempt: str, loss: float) -> None:
    """The epoch was judged."""
    part: Part = context.resident[attempt]
    part.end_epoch(loss)


def keep_weights(context: WorkerContext, attempt: str) -> None:
    """Remember this device's weights as they are now."""
    part: Part = context.resident[attempt]
    part.share.keep_weights()


def collect(
    context: WorkerContext, attempt: str, position: dict[str, Any], history: list[dict[str, float]], random: Random
) -> None:
    """Write this device's state for the builder."""
    part: Part = context.resident[attempt]
    part.share.collect(position, history, random)


def _note_peak(context: WorkerContext, part: Part) -> None:
    context.unit_peak_bytes = part.tensors.peak
    room = part.kit.capacity[part.index]
    if part.tensors.peak > room:
        raise OutOfMemory(part.tensors.peak, room, context.setup.device)
