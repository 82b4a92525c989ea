"""From a built candidate to a trial in stages: how many micro-batches are exact, which node goes where, what each gets.

A candidate is profiled with the rows of one micro-batch. Each placer proposes a device for every node; what a step
would take by it is played through, and the quickest that fits is taken: for one trial the one whose step is shortest,
and for several at once, which fill each other's gaps, one that leaves no device with most of the work. Baechi's placers
(arXiv 2301.08695) minimise the time of one pass through the model, which for a chain means one device; with several
micro-batches in flight a balanced cut is often better, so that is one more proposal here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from hydra_tune.builds import Prepared
from hydra_tune.devices import format_bytes
from hydra_tune.engine.spill import SpillFiles
from hydra_tune.graph.placement import PlacementInfeasible, place
from hydra_tune.pipeline.balanced import Chain
from hydra_tune.pipeline.kit import Held, PipelineKit
from hydra_tune.pipeline.parameters import Dense, Parameters
from hydra_tune.pipeline.schedule import Prediction, in_flight, predict
from hydra_tune.pipeline.stages import Atom, Stage, atoms_of, edges_of, groups_of, stages_of
from hydra_tune.shards.layout import Layout
from hydra_tune.shards.plan import bundles_of
from hydra_tune.shards.prepare import Prospect
from hydra_tune.training import Training, named_tensors

PLACERS = ("best", "m-topo", "m-etf", "m-sct", "balanced")
UNIT_SECONDS = 0.00025
"""What a device loses between two units."""
HAND_OVER_SECONDS = 0.001
"""From the end of a unit to the start of one on another device that waits for it, without the copies."""
ABOUT = 1.05
"""Predictions that differ by less say nothing; a device that never waits is then the worse bet."""
Way = Callable[[float], float]
"""Seconds for so many bytes from one device to another."""


@dataclass(frozen=True)
class LaidOut:
    """A placement in stages, with the time of a step that it promises."""

    placer: str
    stages: tuple[Stage, ...]
    prediction: Prediction


def lay_out(
    prospect: Prospect, devices: int, capacity: Sequence[int], microbatches: int, order: str, placer: str, way: Way,
    *, trials: int = 1,
) -> LaidOut:  # fmt: skip
    """The stages by that placer, or by the best one for so many trials at once. Raises PlacementInfeasible."""
    atoms = atoms_of(prospect.profile)
    names = [name for name in PLACERS if name != "best"] if placer == "best" else [placer]
    found: list[LaidOut] = []
    lacking: list[PlacementInfeasible] = []
    for name in names:
        try:
            device = _placed(prospect, atoms, devices, capacity, microbatches, order, name, way)
            stages = stages_of(prospect.captured, prospect.profile, atoms, device)
            stages = _with_copies(stages, prospect.profile.value_bytes, way)
            _check_room(stages, capacity, order, microbatches)
        except PlacementInfeasible as error:
            lacking.append(error)
            continue
        found.append(LaidOut(name, stages, _prediction(stages, devices, microbatches, order)))
    if not found:
        raise min(lacking, key=lambda error: error.lacking_bytes)
    return _chosen(found, trials)


def _chosen(found: Sequence[LaidOut], trials: int) -> LaidOut:
    """Of those that are about as quick as the quickest, the one whose busiest device has most time to spare."""
    quickest = min(each.prediction.shared_seconds(trials) for each in found)
    quick = [each for each in found if each.prediction.shared_seconds(trials) <= ABOUT * quickest]
    return min(quick, key=lambda each: (max(each.prediction.busy), each.prediction.seconds))


def fewest_devices(prospect: Prospect, room: int, microbatches: int, order: str) -> int | None:
    """On how many devices with so much room a model fits, in contiguous shares; None: on no number of them."""
    atoms = atoms_of(prospect.profile)
    groups = groups_of(prospect.captured, atoms, buffers=prospect.profile.changes_buffers)
    for devices in range(1, len(atoms) + 1):
        capacity = [room] * devices
        device = Chain.of(atoms, groups).balanced(_waiting(devices, microbatches, order), capacity)
        if device is None:
            continue
        try:
            _check_room(stages_of(prospect.captured, prospect.profile, atoms, device), capacity, order, microbatches)
        except PlacementInfeasible:
            continue
        return devices
    return None


def _placed(
    prospect: Prospect, atoms: Sequence[Atom], devices: int, capacity: Sequence[int], microbatches: int, order: str,
    placer: str, way: Way,
) -> list[int]:  # fmt: skip
    """A device for each atom."""
    sizes: dict[Any, float] = {**edges_of(prospect.captured, atoms, prospect.profile.value_bytes)}
    groups = groups_of(prospect.captured, atoms, buffers=prospect.profile.changes_buffers)
    waiting = microbatches if order == "gpipe" else min(microbatches, devices + 1)
    memory: dict[Any, float] = {i: atom.state_bytes + waiting * atom.activation_bytes for i, atom in enumerate(atoms)}
    if placer == "balanced":
        return _balanced(Chain.of(atoms, groups), _waiting(devices, microbatches, order), capacity)
    found = place(
        {i: atom.seconds for i, atom in enumerate(atoms)}, memory,
        {edge: 2 * (way(size) + HAND_OVER_SECONDS) for edge, size in sizes.items()},
        devices=devices, capacity=list(capacity), algorithm=placer, edge_bytes=sizes, groups=groups,
    )  # fmt: skip
    return [found.device[i] for i in range(len(atoms))]


def _waiting(devices: int, microbatches: int, order: str) -> list[int]:
    """How many micro-batches are in flight on each device, where each has a share of the model, one after another."""
    if order == "gpipe":
        return [microbatches] * devices
    return [1] if devices == 1 else [min(microbatches, devices - device + 1) for device in range(devices)]


def _balanced(chain: Chain, waiting: Sequence[int], capacity: Sequence[int]) -> list[int]:
    """Contiguous shares of even time. Raises PlacementInfeasible."""
    device = chain.balanced(waiting, capacity)
    if device is None:
        lacking = chain.lacking(waiting, capacity)
        raise PlacementInfeasible(
            f"{len(waiting)} shares of the model lack {format_bytes(lacking)} on a device", lacking_bytes=lacking
        )
    return device


def _check_room(stages: Sequence[Stage], capacity: Sequence[int], order: str, microbatches: int) -> None:
    """Raise where state, what is in flight and what the largest stage takes besides are more than there is."""
    taken = _taken(stages, len(capacity), order, microbatches)
    lacking = max(size - room for size, room in zip(taken, capacity, strict=True))
    if lacking > 0:
        raise PlacementInfeasible(
            f"the stages and what is in flight lack {format_bytes(lacking)} on a device", lacking_bytes=lacking
        )


def most_on_a_device(stages: Sequence[Stage], devices: int, order: str, microbatches: int) -> int:
    """Bytes on the device that holds most."""
    return max(_taken(stages, devices, order, microbatches))


def _taken(stages: Sequence[Stage], devices: int, order: str, microbatches: int) -> list[int]:
    """What each device holds: state, what is in flight, and what its largest stage takes for a moment."""
    used, peak = [0] * devices, [0] * devices
    for stage, waiting in zip(stages, in_flight(stages, order, microbatches), strict=True):
        used[stage.device] += stage.state_bytes + waiting * stage.activation_bytes
        peak[stage.device] = max(peak[stage.device], stage.peak_bytes)
    return [a + b for a, b in zip(used, peak, strict=True)]


def _prediction(stages: Sequence[Stage], devices: int, microbatches: int, order: str) -> Prediction:
    steps = [0.0] * devices
    for stage in stages:
        steps[stage.device] += stage.step_seconds
    return predict(
        stages, devices, microbatches, order, way=lambda one, other: HAND_OVER_SECONDS, step_seconds=steps,
        unit_seconds=UNIT_SECONDS,
    )  # fmt: skip


def _with_copies(stages: Sequence[Stage], sizes: Mapping[int, int], way: Way) -> tuple[Stage, ...]:
    """The stages with the time that their devices copy: values to others, gradients back, and those that come in.

    Handing over is a copy by the sender and one by the receiver. A device computes nothing else meanwhile; where the
    graph has many small stages, that is a fifth of their time.
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
    """What the workers need; the model in it is still whole."""
    where: dict[str, set[int]] = {}
    tensors = named_tensors(training.model)
    device_of = {op: stage.device for stage in stages for op in stage.ops}
    for node in prospect.captured.nodes:
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
        prepared.candidate, prepared.train, prepared.valid, training.batches.seed, prospect.captured.program,
        tuple(stages), tuple(held), prospect.parts, prospect.profile.draws, training.data_shape(),
        tuple(capacity), parameters,
    )  # fmt: skip


def merged(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The state of a whole trial, as `Training.state` gives it, from those of its devices."""
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
    """The files in which a device's state travels."""
    return SpillFiles(places, f"{name}-{device}")
