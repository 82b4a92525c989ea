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

PLACERS = ("best", "m-topo", "m-etf", "m-sct", "fused", "balanced")
"""`fused` is the best of the three after a local search, with layers placed together with their only users: large
stages that hand little over."""
UNIT_SECONDS = 0.00025
"""What a device loses between two units."""
HAND_OVER_SECONDS = 0.001
"""From the end of a unit to the start of one on another device that waits for it, without the copies."""
REPEATS = 8
"""How often a placement is tried, with less room where what its stages take for a moment did not fit beside it."""
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
            stages = _in_room(prospect, atoms, capacity, microbatches, order, name, way)
        except PlacementInfeasible as error:
            lacking.append(error)
            continue
        found.append(LaidOut(name, stages, _prediction(stages, devices, microbatches, order)))
    if not found:
        raise min(lacking, key=lambda error: error.lacking_bytes)
    return _chosen(found, trials)


def _in_room(
    prospect: Prospect, atoms: Sequence[Atom], capacity: Sequence[int], microbatches: int, order: str, placer: str,
    way: Way,
) -> tuple[Stage, ...]:  # fmt: skip
    """The stages by a placer, so that what each takes for a moment fits too. Raises PlacementInfeasible.

    A placer counts what stays. The peak of a stage is known when the stage is, and comes off its device's room then.
    """
    largest = max(atom.peak_bytes for atom in atoms)
    room, least = list(capacity), 0
    for tries in range(1, REPEATS + 1):
        try:
            device = _placed(prospect, atoms, room, microbatches, order, placer, way)
        except PlacementInfeasible:
            if tries == 1:
                raise
            break  # it speaks of devices that have less than there is
        stages = _stages(prospect, atoms, device)
        taken = _taken(stages, len(capacity), order, microbatches)
        lacking = [max(0, size - there) for size, there in zip(taken, capacity, strict=True)]
        if not any(lacking):
            return _with_copies(stages, prospect.profile.value_bytes, way)
        least = min(least or max(lacking), max(lacking))
        room = [max(0, there - less) for there, less in zip(room, lacking, strict=True)]
        if tries == REPEATS - 1:  # the peak may have gone from one device to the other: now each has room for it
            room = [max(0, there - largest) for there in capacity]
    raise _lacks(least)


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
        stages = _stages(prospect, atoms, device)
        if most_on_a_device(stages, devices, order, microbatches) <= room:
            return devices
    return None


def _placed(
    prospect: Prospect, atoms: Sequence[Atom], capacity: Sequence[int], microbatches: int, order: str, placer: str,
    way: Way,
) -> list[int]:  # fmt: skip
    """A device for each atom."""
    devices = len(capacity)
    sizes: dict[Any, float] = {**edges_of(prospect.captured, atoms, prospect.profile.value_bytes)}
    groups = groups_of(prospect.captured, atoms, buffers=prospect.profile.changes_buffers)
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
        prospect.captured, prospect.profile, atoms, device, judged_batches=prospect.judged_batches,
        metric_bytes=prospect.metric_bytes,
    )  # fmt: skip


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


def _lacks(size: int) -> PlacementInfeasible:
    return PlacementInfeasible(
        f"the stages and what is in flight lack {format_bytes(size)} on a device", lacking_bytes=size
    )


def most_on_a_device(stages: Sequence[Stage], devices: int, order: str, microbatches: int) -> int:
    """Bytes on the device that holds most."""
    return max(_taken(stages, devices, order, microbatches))


def _taken(stages: Sequence[Stage], devices: int, order: str, microbatches: int) -> list[int]:
    """What each device holds: state, what is in flight, and what its largest stage takes for a moment.

    In evaluation nothing is kept, but a batch comes as a whole.
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
