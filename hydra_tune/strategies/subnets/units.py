"""Units of a trial in rounds: the builder lays it out, then any free device runs its units.

All state is in the spill store. Each unit can be repeated with the same result; a unit whose lost worker had committed
already sees that, and does nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hydra_tune.core.devices import format_bytes
from hydra_tune.core.errors import CandidateError
from hydra_tune.core.trees import some_rows
from hydra_tune.core.weights import save_weights
from hydra_tune.engine.transfer import unpack
from hydra_tune.engine.unit import TrialEnded
from hydra_tune.engine.worker import WorkerContext
from hydra_tune.spill.layout import Layout
from hydra_tune.spill.places import write_whole
from hydra_tune.spill.store import SpillFiles
from hydra_tune.spill.stored_tree import read_state, write_state
from hydra_tune.strategies.elastic.centre import Centre, shards_of
from hydra_tune.strategies.epochs import SavedCheckpoint
from hydra_tune.strategies.shard.optimizers import OptimizerParts, Schedule
from hydra_tune.strategies.shard.prepare import PILOT_ROWS, hollow
from hydra_tune.strategies.subnets.assembly import assembled
from hydra_tune.strategies.subnets.deal import in_use
from hydra_tune.strategies.subnets.find import find_structure
from hydra_tune.strategies.subnets.judging import judged, mean_statistics, recompute_statistics, usable_model
from hydra_tune.strategies.subnets.phase import Phase, RoundsKit, State, as_training, start
from hydra_tune.strategies.subnets.shrink import subnet
from hydra_tune.strategies.subnets.structure import Structure
from hydra_tune.strategies.subnets.work import PhaseDone, Spot, SubnetLayout, SubnetRequest
from hydra_tune.strategies.whole.units import restore, write_checkpoint
from hydra_tune.training.batches import Batches
from hydra_tune.training.candidate import Dataset
from hydra_tune.training.checkpoint import Checkpoints
from hydra_tune.training.loop import Training
from hydra_tune.training.prepared import Prepared, load_data, pack_here


def centre_of(spot: Spot, layouts: Sequence[Layout]) -> Centre:
    """Return the centre of an elastic trial."""
    return Centre([Path(place) for place in spot.places], spot.name, layouts)


# In the builder


@dataclass
class _Held:
    """A trial in the builder; its files are removed with it."""

    kit: RoundsKit
    files: SpillFiles

    def close(self) -> None:
        self.files.remove()


def lay_out(
    context: WorkerContext, attempt: str, number: int, seed: int, wanted: SubnetRequest, checkpoints: Path
) -> SubnetLayout:  # fmt: skip
    """Find the parts of the candidate that can be dealt out, and write its state for the devices."""
    prepared: Prepared = context.resident[attempt]
    if wanted.pinned and prepared.valid is None:
        raise CandidateError("Candidate.valid is None, and the training data is pinned", "give validation data too")
    # Pinned data is not read here: the validation data stands in where a batch or a size is needed.
    training = Training(
        prepared.candidate, prepared.valid if wanted.pinned else prepared.train, None, seed, torch.device("cpu")
    )
    loaded = restore(training, checkpoints)
    if not wanted.shared_batches and not wanted.pinned and len(training.batches) < wanted.subnets:
        what = "clients" if wanted.deal is None else "subnets"
        raise CandidateError(
            f"an epoch has {len(training.batches)} batches, and each of {wanted.subnets} {what} needs its own",
            f"give a smaller batch_size, or {len(training.batches)} {what} or fewer",
        )
    structure = _structure(training, wanted)
    names = {id(parameter): name for name, parameter in training.model.named_parameters()}
    # A new optimizer: that of the training has been changed by its scheduler.
    parts = OptimizerParts.of(training.candidate.optimizer(list(training.model.parameters())), names)
    state = start(training, parts, wanted.subnets)
    if loaded.history or training.steps:
        _go_on(state, checkpoints)
    _remove_earlier(context, number)
    files = SpillFiles(
        [Path(p) for p in (context.setup.directory, *context.setup.overflow)], f"trial-{number}-{attempt}"
    )
    spot = Spot(tuple(str(p.parent) for p in files.places), files.places[0].name, str(files.places[0] / "kit"))
    write_state(files, state)
    if wanted.centre_shards:
        centre_of(spot, shards_of(state["tensors"], wanted.centre_shards)).write(state["tensors"])
    candidate = replace(prepared.candidate, split_points=())
    kit = RoundsKit(
        candidate, prepared.train, prepared.valid, seed, structure, wanted.subnets, wanted.local_steps, wanted.travels,
        parts,
    )  # fmt: skip
    sizes = _subnet_parameters(kit, state), sum(p.numel() for p in training.model.parameters())
    hollow(candidate.model)
    write_whole(files.places[0] / "kit", pack_here(context, kit))
    context.resident[attempt] = _Held(kit, files)
    return SubnetLayout(
        spot, state["position"], state["history"], state["account"], state["current"], len(training.batches),
        candidate.accumulate, structure.kinds(), sizes[1], sizes[0], loaded.notes,
    )  # fmt: skip


def _structure(training: Training, wanted: SubnetRequest) -> Structure:
    if wanted.deal is None or wanted.subnets == 1:
        return Structure()
    inputs, _targets = training.batches.fetch(0, 0)
    pilot = some_rows(inputs, training.batches.rows_at(0), 0, PILOT_ROWS)
    return find_structure(training.model, pilot, wanted.subnets, wanted.deal)


def _go_on(state: State, checkpoints: Path) -> None:
    """Load the state specific to rounds from the checkpoint that was just restored."""
    found = Checkpoints(checkpoints).newest()
    rounds = found.state.get("rounds") if found is not None and found.state is not None else None
    if rounds is not None:
        state["position"]["turn"] = rounds["turn"]
        state["account"], state["current"] = rounds["account"], rounds["current"]
        for index, own in enumerate(rounds["random"][: len(state["random"])]):
            state["random"][index] = own


def _subnet_parameters(kit: RoundsKit, state: State) -> int:
    """Return the number of parameters of the largest subnet in the first round."""
    made = (subnet(kit.candidate.model, kit.structure, kit.dealt(0, i), state["tensors"]) for i in range(kit.subnets))
    return max(sum(p.numel() for p in model.parameters()) for model in made)


def _remove_earlier(context: WorkerContext, number: int) -> None:
    """Remove files of earlier attempts whose builder was lost."""
    for place in (context.setup.directory, *context.setup.overflow):
        for left in Path(place).glob(f"trial-{number}-*"):
            shutil.rmtree(left, ignore_errors=True)


# On a device


@dataclass
class Resident:
    """A worker's cache for a trial in rounds."""

    kit: RoundsKit
    peak: int = 0
    """Peak bytes of a phase in this worker; 0 before one is measured."""
    clients: dict[int, Any] = field(default_factory=dict)
    """For an elastic trial: the client that worked here last."""


class SubnetTooLarge(TrialEnded):
    """A subnet or client needs more memory than a device has."""

    status = "OUT_OF_MEMORY"

    def __init__(self, needed: int, budget: int, device: str, what: str = "a subnet") -> None:
        more = "give more subnets, or " if what == "a subnet" else "give "
        super().__init__(
            f"{what} needs {format_bytes(needed)} on {device}, whose budget is {format_bytes(budget)} "
            f"({more}--device-memory {-(-needed // 2**20)}MiB or more)"
        )


def train_subnet(context: WorkerContext, attempt: str, spot: Spot, turn: int, index: int) -> PhaseDone:
    """Run one subnet's local phase of round `turn`."""
    held = taken_up(context, attempt, spot)
    state = read_state(spot.files())
    assert state["position"]["turn"] == turn, "a phase of another round"
    phase = Phase(held.kit, state, turn, index, context.device, _partition(context, held.kit, index))
    if held.peak:
        phase.is_measured()
    phase.train_steps(held.kit.local_steps)
    held.peak = max(held.peak, phase.peak_bytes)
    context.unit_peak_bytes = held.peak
    if held.peak > context.setup.memory:
        raise SubnetTooLarge(held.peak, context.setup.memory, context.setup.device)
    write_state(spot.files(f"subnet-{index}"), {"turn": turn, **phase.result()})
    return PhaseDone(index, phase.communicated, phase.loss_rows, phase.loss_sum)


def look(context: WorkerContext, attempt: str, spot: Spot, index: int) -> int:
    """Return the number of batches in a subnet's own partition."""
    kit = taken_up(context, attempt, spot).kit
    return len(Batches(kit.candidate, _partition(context, kit, index), training=True))


def partition_statistics(context: WorkerContext, attempt: str, spot: Spot, index: int) -> None:
    """Write the batch-norm statistics of a subnet's own partition."""
    kit = taken_up(context, attempt, spot).kit
    state: State = read_state(spot.files())
    model = usable_model(kit, in_use(kit.structure, kit.subnets, state["tensors"]), context.device)
    found = recompute_statistics(kit, model, context.device, _partition(context, kit, index))
    write_state(spot.files(f"statistics-{index}"), found)


def _partition(context: WorkerContext, kit: RoundsKit, index: int) -> Dataset | None:
    return load_data(context, kit.train.partitions[index]) if kit.pinned else None


def assemble(context: WorkerContext, attempt: str, spot: Spot, turn: int, arrived: Sequence[int]) -> None:
    """End round `turn`: merge the results of the subnets that arrived into the trial's state."""
    kit = taken_up(context, attempt, spot).kit
    files = spot.files()
    state = read_state(files)
    if state["position"]["turn"] > turn:
        return  # committed just before its worker was lost
    results = {index: read_state(spot.files(f"subnet-{index}")) for index in arrived}
    assert all(result["turn"] == turn for result in results.values()), "a result of another round"
    write_state(files, assembled(kit, state, results))


def end_epoch(
    context: WorkerContext, attempt: str, spot: Spot, epoch: int, account: dict[str, Any]
) -> dict[str, float]:
    """Evaluate the model as in use, and advance to the next epoch. Return every metric."""
    kit = taken_up(context, attempt, spot).kit
    files = spot.files()
    state: State = read_state(files)
    at = state["position"]
    if at["epoch"] > epoch:
        done: dict[str, float] = state["history"][epoch]
        return done
    train_loss = at["loss_sum"] / max(at["loss_rows"], 1)
    given = None
    if kit.pinned:
        given = mean_statistics([read_state(spot.files(f"statistics-{index}")) for index in range(kit.subnets)])
    metrics, statistics = judged(kit, state, context.device, given)
    found = {"train_loss": train_loss, **(metrics or {"loss": train_loss})}
    schedule = Schedule(kit.parts, kit.candidate.scheduler, state["scheduler"], state["groups"])
    if kit.candidate.schedule_every == "epoch":
        schedule.step(found["loss"])
    position = {**at, "epoch": epoch + 1, "batch": 0, "loss_sum": 0.0, "loss_rows": 0}
    changed: State = {
        **state, "tensors": {**state["tensors"], **statistics}, "position": position, "groups": list(schedule.options),
        "scheduler": schedule.state(), "history": [*state["history"], found], "account": [*state["account"], account],
    }  # fmt: skip
    write_state(files, changed)
    return found


def keep_weights(context: WorkerContext, attempt: str, spot: Spot) -> None:
    """Keep a copy of this epoch's weights, as in use, as the best so far."""
    kit = taken_up(context, attempt, spot).kit
    files = spot.files()
    state: State = read_state(files)
    write_state(files, {**state, "kept": in_use(kit.structure, kit.subnets, state["tensors"])})


def checkpoint(
    context: WorkerContext, attempt: str, spot: Spot, directory: Path, current: dict[str, Any]
) -> SavedCheckpoint:
    """Write the trial's state as a checkpoint."""
    kit = taken_up(context, attempt, spot).kit
    state: State = read_state(spot.files())
    batches = Batches(kit.candidate, kit.valid if kit.pinned else kit.train, training=True)
    data = batches.rows, batches.size, len(batches)
    step = state["position"]["steps"] + state["position"]["epoch"]
    return write_checkpoint(directory, step, lambda: as_training(state, kit.parts, data, current))


def save(context: WorkerContext, attempt: str, spot: Spot, path: Path) -> None:
    """Write the final weights, as in use."""
    kit = taken_up(context, attempt, spot).kit
    state: State = read_state(spot.files())
    tensors = state["kept"] or in_use(kit.structure, kit.subnets, state["tensors"])
    save_weights(usable_model(kit, tensors, torch.device("cpu")), path)


def taken_up(context: WorkerContext, attempt: str, spot: Spot) -> Resident:
    held: Resident | None = context.resident.get(attempt)
    if held is None:
        held = context.resident[attempt] = Resident(unpack(Path(spot.kit).read_bytes()))
    return held
