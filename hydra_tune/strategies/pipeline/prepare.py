"""Lays out a built candidate as a pipeline: number of micro-batches, placement of nodes, each device's share.

A candidate is profiled with the rows of one micro-batch. Each placer proposes a device for every node; a step of each
proposal is simulated, and the fastest that fits is taken: for one trial the shortest step, for several concurrent
trials, which fill each other's gaps, a proposal whose busiest device has little work. Baechi's placers (arXiv
2301.08695) minimise the time of one pass through the model, which for a chain means one device; with several
micro-batches in flight a balanced cut is often better, so it is one more proposal here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from hydra_tune.core.devices import format_bytes
from hydra_tune.graph.placement import PlacementInfeasible, place
from hydra_tune.spill.layout import Layout
from hydra_tune.spill.store import SpillFiles
from hydra_tune.strategies.pipeline.balanced import Chain
from hydra_tune.strategies.pipeline.kit import Held, PipelineKit
from hydra_tune.strategies.pipeline.parameters import Dense, Parameters
from hydra_tune.strategies.pipeline.schedule import Prediction, in_flight, predict
from hydra_tune.strategies.pipeline.staged import PLACERS
from hydra_tune.strategies.pipeline.stages import Atom, Stage, atoms_of, edges_of, groups_of, stages_of
from hydra_tune.strategies.shard.plan import bundles_of
from hydra_tune.strategies.shard.prepare import Prospect
from hydra_tune.training.loop import Training, named_tensors
from hydra_tune.training.prepared import Prepared

UNIT_SECONDS = 0.00025
"""Overhead of a device between two units."""
HAND_OVER_SECONDS = 0.001
"""Seconds from the end of a unit to the start of one on another device that waits for it, without copies."""
REPEATS = 8
"""Number of placement attempts, each with less room if the temporary memory of the stages did not fit."""
ABOUT = 1.05
"""Predictions within this factor count as equal; the one with the less busy device is then taken."""
Way = Callable[[float], float]
"""Seconds to move this many bytes from one device to another."""


@dataclass(frozen=True)
class PipelineLayout:
    """A placement in stages, with the predicted time of a step."""

    placer: str
    stages: tuple[Stage, ...]
    prediction: Prediction


def lay_out(
    prospect: Prospect, devices: int, capacity: Sequence[int], microbatches: int, order: str, placer: str, way: Way,
    *, trials: int = 1,
) -> PipelineLayout:  # fmt: skip
    """Return the stages of this placer, or of the best one for this many trials. Raises PlacementInfeasible."""
    atoms = atoms_of(prospect.profile)
    names = [name for name in PLACERS if name != "best"] if placer == "best" else [placer]
    found: list[PipelineLayout] = []
    lacking: list[PlacementInfeasible] = []
    for name in names:
        try:
            stages = _in_room(prospect, atoms, capacity, microbatches, order, name, way)
        except PlacementInfeasible as error:
            lacking.append(error)
            continue
        found.append(PipelineLayout(name, stages, _prediction(stages, devices, microbatches, order)))
    if not found:
        raise min(lacking, key=lambda error: error.lacking_bytes)
    return _chosen(found, trials)


def _in_room(
    prospect: Prospect, atoms: Sequence[Atom], capacity: Sequence[int], microbatches: int, order: str, placer: str,
    way: Way,
) -> tuple[Stage, ...]:  # fmt: skip
    """Return the stages of a placer such that their temporary memory fits too. Raises PlacementInfeasible.

    A placer counts permanent bytes only. The peak of a stage is known once the stage is, and is then subtracted from
    its device's room.
    """
    largest = max(atom.peak_bytes for atom in atoms)
    room, least = list(capacity), 0
    for tries in range(1, REPEATS + 1):
        try:
            device = _placed(prospect, atoms, room, microbatches, order, placer, way)
        except PlacementInfeasible:
            if tries == 1:
                raise
            break  # the message would name reduced capacities
        stages = _stages(prospect, atoms, device)
        taken = _taken(stages, len(capacity), order, microbatches)
        lacking = [max(0, size - there) for size, there in zip(taken, capacity, strict=True)]
        if not any(lacking):
            return _with_copies(stages, prospect.profile.value_bytes, way)
        least = min(least or max(lacking), max(lacking))
        room = [max(0, there - less) for there, less in zip(room, lacking, strict=True)]
        if tries == REPEATS - 1:  # the peak may have moved to another device: reserve it on every device
            room = [max(0, there - largest) for there in capacity]
    raise _lacks(least)


def _chosen(found: Sequence[PipelineLayout], trials: int) -> PipelineLayout:
    """Among placements about as fast as the fastest, choose the one whose busiest device has the least work."""
    quickest = min(each.prediction.shared_seconds(trials) for each in found)
    quick = [each for each in found if each.prediction.shared_seconds(trials) <= ABOUT * quickest]
    return min(quick, key=lambda each: (max(each.prediction.busy), each.prediction.seconds))


def why_one_device(prospect: Prospect, layout: PipelineLayout) -> str:
    """Say why all stages are on one device; empty if they are not."""
    if len({stage.device for stage in layout.stages}) > 1:
        return ""
    why = why_uncut(prospect)
    if why:
        return f"all of the model is on one device: {why}"
    return (
        f"all of the model is on one device, where a step is predicted to take no longer ({layout.placer}); "
        "placer: balanced divides it in any case"
    )


def why_uncut(prospect: Prospect) -> str:
    """Say why a model cannot be cut into stages; empty if it can."""
    recorded = prospect.recorded
    if recorded.whole_because:
        return f"the model cannot be cut into stages, as {recorded.whole_because}"
    if len(recorded.nodes) == 1:
        return "the model has a single layer with parameters"
    atoms = atoms_of(prospect.profile)
    if len(atoms) == 1:
        return "the model can be cut nowhere, as values that it changes in place, or buffers, are used on both sides"
    groups = groups_of(recorded, atoms, buffers=prospect.profile.changes_buffers)
    if any(len(group) == len(atoms) for group in groups):
        return "the model can be cut nowhere, as its layers share parameters"
    return ""


def fewest_devices(prospect: Prospect, room: int, microbatches: int, order: str) -> int | None:
    """Return the number of devices with this much room that the model needs in contiguous shares, or None."""
    atoms = atoms_of(prospect.profile)
    groups = groups_of(prospect.recorded, atoms, buffers=prospect.profile.changes_buffers)
    for devices in range(1, len(atoms) + 1):
        capacity = [room] * devices
        device = Chain.of(atoms, groups).balanced(_waiting(devices, microbatches, order), capacity)
        if device is None:
            continue
        stages = _stages(prospect, atoms, device)
        if most_on_a_device(stages, devices, order, microbatches) <= room:
            return devices
    return None


def _placed(
    prospect: Prospect, atoms: Sequence[Atom], capacity: Sequence[int], microbatches: int, order: str, placer: str,
    way: Way,
) -> list[int]:  # fmt: skip
    """Return a device for each atom."""
    devices = len(capacity)
    sizes: dict[Any, float] = {**edges_of(prospect.recorded, atoms, prospect.profile.value_bytes)}
    groups = groups_of(prospect.recorded, atoms, buffers=prospect.profile.changes_buffers)
    waiting = microbatches if order == "gpipe" else min(microbatches, devices + 1)
    memory: dict[Any, float] = {i: atom.state_bytes + waiting * atom.activation_bytes for i, atom in enumerate(atoms)}
    if placer == "balanced":
        return _balanced(Chain.of(atoms, groups), _waiting(devices, microbatches, order), capacity)
    found = place(
        {i: atom.seconds for i, atom in enumerate(atoms)}, memory,
        {edge: 2 * (way(size) + HAND_OVER_SECONDS) for edge, size in sizes.items()},
        devices=devices, capacity=list(capacity), algorithm="best" if placer == "fused" else placer, edge_bytes=sizes,
        groups=groups, fused=placer == "fused",
    )  # fmt: skip
    return [found.device[i] for i in range(len(atoms))]


def _stages(prospect: Prospect, atoms: Sequence[Atom], device: Sequence[int]) -> tuple[Stage, ...]:
    return stages_of(
        prospect.recorded, prospect.profile, atoms, device, judged_batches=prospect.judged_batches,
        metric_bytes=prospect.metric_bytes,
    )  # fmt: skip


def _waiting(devices: int, microbatches: int, order: str) -> list[int]:
    """Return the micro-batches in flight on each device, if each has one contiguous share of the model."""
    if order == "gpipe":
        return [microbatches] * devices
    return [1] if devices == 1 else [min(microbatches, devices - device + 1) for device in range(devices)]


def _balanced(chain: Chain, waiting: Sequence[int], capacity: Sequence[int]) -> list[int]:
    """Return contiguous shares of even time. Raises PlacementInfeasible."""
    device = chain.balanced(waiting, capacity)
    if device is None:
        lacking = chain.lacking(waiting, capacity)
        raise PlacementInfeasible(
            f"{len(waiting)} shares of the model lack {format_bytes(lacking)} on a device", lacking_bytes=lacking
        )
    return device


def _lacks(size: int) -> PlacementInfeasible:
    return PlacementInfeasible(
        f"the stages and what is in flight lack {format_bytes(size)} on a device", lacking_bytes=size
    )


def most_on_a_device(stages: Sequence[Stage], devices: int, order: str, microbatches: int) -> int:
    """Return the bytes on the device that holds most."""
    return max(_taken(stages, devices, order, microbatches))


def _taken(stages: Sequence[Stage], devices: int, order: str, microbatches: int) -> list[int]:
    """Return the bytes on each device: state, micro-batches in flight, and the largest temporary memory of a stage.

    Evaluation keeps no activations, but runs a whole batch at once.
    """
    state, flying, peak, judged = ([0] * devices for _ in range(4))
    for stage, waiting in zip(stages, in_flight(stages, order, microbatches), strict=True):
        state[stage.device] += stage.state_bytes
        flying[stage.device] += waiting * stage.activation_bytes
        peak[stage.device] = max(peak[stage.device], stage.peak_bytes)
        judged[stage.device] = max(judged[stage.device], stage.judged_bytes)
    return [a + max(b + c, d) for a, b, c, d in zip(state, flying, peak, judged, strict=True)]


def _prediction(stages: Sequence[Stage], devices: int, microbatches: int, order: str) -> Prediction:
    steps = [0.0] * devices
    for stage in stages:
        steps[stage.device] += stage.step_seconds
    return predict(
        stages, devices, microbatches, order, way=lambda one, other: HAND_OVER_SECONDS, step_seconds=steps,
        unit_seconds=UNIT_SECONDS,
    )  # fmt: skip


def _with_copies(stages: Sequence[Stage], sizes: Mapping[int, int], way: Way) -> tuple[Stage, ...]:
    """Return the stages with the time their devices spend copying values and gradients between devices.

    Passing a value takes a copy by the sender and one by the receiver, during which neither computes. With many small
    stages that is a fifth of their time.
    """
    made_on = {value: stage.device for stage in stages for value in stage.gives}
    taken_on: dict[int, set[int]] = {}
    for stage in stages:
        for value in stage.takes:
            taken_on.setdefault(value, set()).add(stage.device)

    def copy(values: Iterable[int]) -> float:
        return sum(way(sizes.get(value, 0)) / 2 for value in values)

    found = []
    for stage in stages:
        given = copy(v for v in stage.gives if taken_on.get(v, set()) - {stage.device})
        taken = copy(v for v in stage.takes if made_on.get(v, stage.device) != stage.device)
        found.append(replace(
            stage, forward_seconds=stage.forward_seconds + given,
            backward_seconds=stage.backward_seconds + taken + given,
        ))  # fmt: skip
    return tuple(found)


def make_kit(
    prospect: Prospect, stages: Sequence[Stage], capacity: Sequence[int], prepared: Prepared, training: Training,
    parameters: type[Parameters] = Dense,
) -> PipelineKit:  # fmt: skip
    """Return the kit for the workers; its model still has its weights."""
    where: dict[str, set[int]] = {}
    tensors = named_tensors(training.model)
    device_of = {op: stage.device for stage in stages for op in stage.ops}
    for node in prospect.recorded.nodes:
        for name in (*node.parameters, *node.buffers):
            where.setdefault(name, set()).update(device_of[op] for op in range(node.start, node.stop))
    for name, at in where.items():
        assert len(at) == 1 or not isinstance(tensors[name], nn.Parameter), f"{name} is on devices {sorted(at)}"
    held = []
    for device in range(len(capacity)):
        mine = [name for name in tensors if device in where.get(name, {0})]
        users = {name: [device] for name in mine if isinstance(tensors[name], nn.Parameter)}
        buffers = [name for name in mine if name not in users]
        layout = Layout.of((name, tensors[name].dtype, tuple(tensors[name].shape)) for name in buffers)
        bundles = bundles_of(users, tensors, prospect.profile.state, prospect.pruned)
        held.append(Held(bundles, {f"b/{device}": layout}))
    return PipelineKit(
        prepared.candidate, prepared.train, prepared.valid, training.batches.seed, prospect.recorded.program,
        tuple(stages), tuple(held), prospect.parts, prospect.profile.draws, training.data_shape(),
        tuple(capacity), parameters,
    )  # fmt: skip


def merged(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Merge the devices' states into the state of the whole trial, as `Training.state` returns it."""
    first, *others = states
    whole = {**first, "optimizer": dict(first["optimizer"])}
    for other in others:
        for name in ("tensors", "gradients"):
            whole[name] = {**whole[name], **other[name]}
        if whole["kept"] is not None:
            whole["kept"] = {**whole["kept"], **other["kept"]}
        whole["optimizer"]["state"] = {**whole["optimizer"]["state"], **other["optimizer"]["state"]}
    return whole


def files_of(places: Sequence[Path], name: str, device: int) -> SpillFiles:
    """Return the files that transport a device's state."""
    return SpillFiles(places, f"{name}-{device}")
