"""Functions that run in processes for a trial in shards: cutting and saving in the builder, training on devices."""

from __future__ import annotations

import logging
import math
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hydra_tune.core import accelerator
from hydra_tune.core.devices import format_bytes
from hydra_tune.core.errors import Infeasible
from hydra_tune.core.weights import save_weights
from hydra_tune.engine.unit import TrialEnded
from hydra_tune.engine.worker import WorkerContext
from hydra_tune.graph.costs import ShardCost
from hydra_tune.graph.partition import MIB
from hydra_tune.spill.device_memory import DeviceMemory, OutOfDeviceMemory
from hydra_tune.spill.places import write_whole
from hydra_tune.spill.store import SpillFiles
from hydra_tune.strategies.epochs import SavedCheckpoint
from hydra_tune.strategies.shard.checkpoint_forms import CheckpointForm
from hydra_tune.strategies.shard.cut import At, ShardCut, SliceDone, Spilled
from hydra_tune.strategies.shard.exchange import kept_weights, present_weights, put_together, take_apart
from hydra_tune.strategies.shard.first_batch import NOT_COMPARED, SAME, FirstBatch, first_batch
from hydra_tune.strategies.shard.kit import Kit, packed_kit, unpacked_kit
from hydra_tune.strategies.shard.logbook import Logbook
from hydra_tune.strategies.shard.prepare import Prospect, make_kit, observe_again, observe_candidate
from hydra_tune.strategies.shard.skeleton import empty_parameters
from hydra_tune.strategies.shard.trial import ShardedTrial
from hydra_tune.strategies.whole.units import restore, write_checkpoint
from hydra_tune.training.batches import Batches
from hydra_tune.training.loop import Training, named_tensors
from hydra_tune.training.prepared import Prepared, fingerprint

logger = logging.getLogger(__name__)


class StepTooLarge(TrialEnded):
    """Raised if a step of this batch did not fit its device."""

    status = "OUT_OF_MEMORY"

    def __init__(self, message: str, at: At) -> None:
        super().__init__(message)
        self.facts = at


BUDGET_AFTER_OOM = 0.85
SMALLER = 0.75
"""Factor for the share of the budget, applied until the cut changes, if measuring the batch did not change it."""
LEAST_SHARE = 0.2


# In the builder


@dataclass
class Cuttable:
    """A trial in the builder: its kit, its files, and what is needed to cut it anew."""

    prospect: Prospect
    kit: Kit
    files: SpillFiles
    budget: int
    data: tuple[int, int, int]
    shapes: dict[str, torch.Tensor]
    """Every parameter and buffer by name, without contents."""
    form: CheckpointForm
    share: float = field(default=1.0, kw_only=True)
    """Share of the budget that the cut may use."""

    def close(self) -> None:
        self.files.remove()

    def state(self) -> dict[str, Any]:
        """Return the trial's state as of the last commit."""
        self.files.reload()
        return put_together(self.files, self.kit.plan, self.kit.parts, self.data)

    def measure(self, at: At | None) -> None:
        """Raise the costs to cover this batch too, if it can be measured."""
        if at is None or type(self.form) is not CheckpointForm:
            return  # of a network that is pruned, or to be, what is computed with is not what is in the blocks
        kit, model = self.kit, self.kit.candidate.model
        weights = self.state()["tensors"]  # a forward may change them: they are read again for what is written
        for name, tensor in named_tensors(model).items():
            tensor.data = weights[name]
        try:
            inputs, targets = _batches(kit, at).fetch(at.epoch, at.batch)
            self.prospect = observe_again(self.prospect, kit.candidate, inputs, targets, judged=at.judging)
        except Exception as error:  # noqa: BLE001 - user code that worked on a device: a smaller cut will do as well
            logger.info("the batch that found no room cannot be measured: %s", error)
        finally:
            empty_parameters(model)

    def smaller_shards(self, failure: str) -> tuple[ShardCost, ...]:
        """Return another cut than the present one; raise TooLarge, with the reason `failure`, if none fits."""
        before = [(shard.cost.start, shard.cost.stop) for shard in self.kit.plan.shards]
        while self.share >= LEAST_SHARE:
            try:
                costs = self.prospect.shards(int(self.budget * self.share))
            except Infeasible as error:
                if self.share < 1.0:
                    break
                enough = math.ceil(error.smallest_budget / MIB)
                raise ShardsTooLarge(
                    f"{failure}, and in the smallest shards node {error.node!r} takes "
                    f"{format_bytes(error.needed_bytes)} for that batch (give a device_memory of {enough}MiB or more)"
                ) from error
            if [(cost.start, cost.stop) for cost in costs] != before:
                return costs
            self.share *= SMALLER
        raise ShardsTooLarge(f"{failure}, and smaller shards were no help (give more device_memory)")


def cut(
    context: WorkerContext, attempt: str, number: int, seed: int, budget: int, checkpoints: Path, profiles: Path
) -> ShardCut:  # fmt: skip
    """Cut the candidate that was built here, and write its shards to the spill store."""
    prepared: Prepared = context.resident[attempt]
    initial = fingerprint(prepared.candidate.model)
    training = Training(prepared.candidate, prepared.train, prepared.valid, seed, torch.device("cpu"))
    loaded = restore(training, checkpoints)
    prospect = observe_candidate(training, profiles)
    first, why_not = first_batch(training, prospect.profile.nodes, prospect.observed.rewritten)
    made = cut_up(
        context, attempt, number, prospect, prepared, training.state(), seed, budget, CheckpointForm(), loaded.notes,
        first=first, initial=initial,
    )  # fmt: skip
    return replace(made, comparison=f"{NOT_COMPARED}: {why_not}" if why_not else SAME)


def cut_up(
    context: WorkerContext, attempt: str, number: int, prospect: Prospect, prepared: Prepared, state: dict[str, Any],
    seed: int, budget: int, form: CheckpointForm, notes: tuple[str, ...], suffix: str = "",
    first: FirstBatch | None = None, initial: str = "",
) -> ShardCut:  # fmt: skip
    """Write a candidate's state to the spill store, in shards; the model here is a skeleton from now on."""
    model = prepared.candidate.model
    costs = _shards(prospect, budget)
    tensors = named_tensors(model)
    kit = make_kit(prospect, costs, prepared, seed, tensors, between_steps=form.between_steps)
    kit = replace(kit, first=first, initial=initial)
    _remove_earlier(context, number)
    files = SpillFiles(_places(context), f"trial-{number}-{attempt}{suffix}")
    take_apart(state, kit.plan, kit.parts, files)
    shapes = {name: _shape_of(tensor) for name, tensor in tensors.items()}
    empty_parameters(model)
    context.resident[attempt] = Cuttable(prospect, kit, files, budget, state["data"], shapes, form)
    return _described(context, files, kit, state["history"], notes)


def cut_again(context: WorkerContext, attempt: str, at: At | None, failure: str) -> ShardCut:
    """Cut a trial anew, from its last commit, by the measured costs of the batch that did not fit."""
    held: Cuttable = context.resident[attempt]
    held.measure(at)
    costs, state = held.smaller_shards(failure), held.state()
    prepared = held.kit.prepared
    made = make_kit(
        held.prospect, costs, prepared, held.kit.seed, held.shapes, between_steps=held.form.between_steps
    )  # fmt: skip
    held.kit = replace(made, first=held.kit.first, initial=held.kit.initial)
    before = Logbook.from_json(held.files.notes)
    take_apart(
        state, held.kit.plan, held.kit.parts, held.files, commits=before.commits + 1, attributes=before.attributes
    )  # fmt: skip
    return _described(context, held.files, held.kit, state["history"])


def _batches(kit: Kit, at: At) -> Batches:
    """Return the batches, training or validation, that the batch at `at` belongs to."""
    if not at.judging:
        return Batches(kit.candidate, kit.train, training=True, seed=kit.seed)
    assert kit.valid is not None
    return Batches(kit.candidate, kit.valid, training=False)


class ShardsTooLarge(TrialEnded):
    """Raised if some part of the model does not fit a device even by itself."""

    status = "OUT_OF_MEMORY"


def _shards(prospect: Prospect, budget: int) -> tuple[ShardCost, ...]:
    try:
        return prospect.shards(budget)
    except Infeasible as error:
        raise ShardsTooLarge(str(error)) from error


def checkpoint(context: WorkerContext, attempt: str, directory: Path) -> SavedCheckpoint:
    """Write the trial's last commit as a checkpoint."""
    held: Cuttable = context.resident[attempt]
    held.files.reload()
    logbook = Logbook.from_json(held.files.notes)
    step = logbook.epoch * held.data[2] + logbook.batch
    return write_checkpoint(directory, step, lambda: held.form.checkpoint(held.state()))


def save(context: WorkerContext, attempt: str, path: Path) -> None:
    """Write the trial's weights to `path`: those of the best epoch if they were kept, else those of the last commit."""
    held: Cuttable = context.resident[attempt]
    held.files.reload()
    files, plan, model = held.files, held.kit.plan, held.kit.candidate.model
    own = named_tensors(model)
    kept = kept_weights(files, plan) if Logbook.from_json(files.notes).kept else None
    for name, tensor in held.form.weights(kept, lambda: present_weights(files, plan)).items():
        own[name].data = tensor.clone()  # safetensors wants each tensor in a storage of its own
    save_weights(model, path)
    empty_parameters(model)


def _shape_of(tensor: torch.Tensor) -> torch.Tensor:
    shape = torch.empty_like(tensor, device="meta")
    return torch.nn.Parameter(shape, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else shape


def _places(context: WorkerContext) -> list[Path]:
    return [Path(place) for place in (context.setup.directory, *context.setup.overflow)]


def _remove_earlier(context: WorkerContext, number: int) -> None:
    """Remove files that earlier attempts at the trial left behind when their builder was lost."""
    for place in _places(context):
        for left in place.glob(f"trial-{number}-*"):
            shutil.rmtree(left, ignore_errors=True)


def _described(
    context: WorkerContext, files: SpillFiles, kit: Kit, history: list[dict[str, float]], notes: tuple[str, ...] = ()
) -> ShardCut:
    """Write the kit to a file of its own, which devices read, and return the cut."""
    number = sum(1 for _ in files.places[0].glob("kit-*"))
    path = files.places[0] / f"kit-{number}"
    write_whole(path, packed_kit(context, kit))
    places = tuple(str(place.parent) for place in files.places)
    return ShardCut(len(kit.plan.shards), history, notes, places=places, name=files.places[0].name, kit=str(path))


# On a device


def train_slice(context: WorkerContext, attempt: str, spilled: Spilled, seconds: float) -> SliceDone:
    """Train for about `seconds`, at most to the end of the epoch."""
    with _taken_up(context, attempt, spilled) as trial:
        return trial.done(trial.trial.train_for(seconds))


def commit(context: WorkerContext, attempt: str, spilled: Spilled) -> SliceDone:
    """Commit the training that this device has done."""
    with _taken_up(context, attempt, spilled) as trial:
        trial.trial.commit()
        return trial.done(None)


def end_epoch(context: WorkerContext, attempt: str, spilled: Spilled, epoch: int) -> SliceDone:
    """Evaluate, and go to the next epoch; `SliceDone` has the metrics."""
    with _taken_up(context, attempt, spilled) as trial:
        return trial.done(trial.trial.end_epoch(epoch))


def keep_weights(context: WorkerContext, attempt: str, spilled: Spilled) -> SliceDone:
    """Keep this epoch's weights as the best so far."""
    with _taken_up(context, attempt, spilled) as trial:
        trial.trial.keep_weights()
        return trial.done(None)


class _Taken:
    """A trial on this device for one unit; if the unit fails, the trial is dropped from the device."""

    def __init__(self, context: WorkerContext, attempt: str, trial: ShardedTrial) -> None:
        self.context = context
        self.attempt = attempt
        self.trial = trial
        self._before = trial.files.read_bytes, trial.files.written_bytes

    def __enter__(self) -> _Taken:
        self.trial.memory.begin_measuring()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _where: object) -> None:
        self.context.unit_peak_bytes = self.trial.memory.peak
        self.context.steps.extend(self.trial.records)
        self.trial.records.clear()
        if error is not None:
            self.context.resident.pop(self.attempt).close()
        if isinstance(error, torch.OutOfMemoryError):
            # The device has less than its budget says: smaller shards alone would fill it up again.
            self.trial.memory.lower(BUDGET_AFTER_OOM)
            accelerator.release_cached(self.context.device)
        if isinstance(error, torch.OutOfMemoryError | OutOfDeviceMemory):
            raise StepTooLarge(str(error), self.trial.at) from error

    def done(self, value: Any) -> SliceDone:
        files = self.trial.files
        read, written = self._before
        commits, committed = self.trial.logbook.commits, self.trial.committed
        return SliceDone(value, commits, committed, files.read_bytes - read, files.written_bytes - written)


def _taken_up(context: WorkerContext, attempt: str, spilled: Spilled) -> _Taken:
    """Return the trial for one unit; it is read from its last commit unless this worker already has that state."""
    trial: ShardedTrial | None = context.resident.get(attempt)
    if trial is not None and trial.kit_file != spilled.kit:
        context.resident.pop(attempt).close()
        trial = None
    if trial is None:
        kit = unpacked_kit(context, Path(spilled.kit).read_bytes())
        kit.candidate.model.to(context.device)
        files = SpillFiles([Path(place) for place in spilled.places], spilled.name)
        trial = context.resident[attempt] = ShardedTrial(kit, _memory(context, spilled), files, spilled.kit)
        trial.on_step = context.alive
    elif trial.logbook.commits != spilled.commits:
        trial.take_up()
    return _Taken(context, attempt, trial)


def _memory(context: WorkerContext, spilled: Spilled) -> DeviceMemory:
    """Return the device's memory, which all trials of this worker share."""
    memory = context.blocks
    if memory is None:
        memory = context.blocks = DeviceMemory(context.setup.memory, context.device, prefetch=spilled.double_buffering)
        context.limit_blocks(context.block_limit)
    assert isinstance(memory, DeviceMemory)
    return memory
