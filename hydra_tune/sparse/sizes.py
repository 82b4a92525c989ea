"""What a pruned network takes, before it is trained: bytes of state, bytes of a step, and how many stages it needs.

Pure functions of counts and measured costs, for plans and for who chooses between strategies. What the tensors of a
trial really take is counted elsewhere (`state.py`), and is the same where it is the same thing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from hydra_tune.graph.costs import NodeCost, aligned
from hydra_tune.graph.program import HALF
from hydra_tune.pipeline.prepare import fewest_devices
from hydra_tune.shards.plan import Pruned, StateLayout
from hydra_tune.shards.prepare import Prospect
from hydra_tune.sparse.masks import prunable, survivors

INDEX_BYTES = 4
STEP_TENSORS = 4
"""Vectors of survivors that a step takes for a moment: their weights and gradients, and what the optimizer makes."""


@dataclass(frozen=True)
class Layer:
    """A weight that is pruned."""

    weights: int
    survivors: int
    dtype: torch.dtype = torch.float32
    """As the candidate has it."""


def layers_of(model: nn.Module, sparsity: float, least: int = 1) -> dict[str, Layer]:
    """The layers that are pruned by default, and what is left of each."""
    return {
        name: Layer(w.numel(), survivors(w.numel(), sparsity, least), w.dtype) for name, w in prunable(model).items()
    }


# Bytes


def survivor_bytes(*, mixed: bool, moments: int = 2, number: int = 4) -> int:
    """What is stored for a weight that survives, besides the weight that the model computes with.

    `moments` are the optimizer's tensors (2 for Adam), `number` the bytes of one of the candidate's own numbers.
    """
    if not mixed:
        return INDEX_BYTES + number + moments * number
    half, wide = HALF.itemsize, 4
    return INDEX_BYTES + half + wide + wide + moments * wide + half


def state_bytes(
    pruned: int, unpruned: int, sparsity: float, *, mixed: bool = True, moments: int = 2, number: int = 4
) -> int:
    """All state of a network on a device, of so many weights that are pruned and parameters that are not.

    The counts are those of one device's parameters, where a network is on several in stages.
    """
    kept = round(pruned * (1.0 - sparsity))
    return counted_bytes(pruned, kept, unpruned, mixed=mixed, moments=moments, number=number)


def counted_bytes(pruned: int, kept: int, unpruned: int, *, mixed: bool, moments: int = 2, number: int = 4) -> int:
    """The same for a number of survivors."""
    compute = HALF.itemsize if mixed else number
    left = kept * survivor_bytes(mixed=mixed, moments=moments, number=number)
    return compute * pruned + left + (2 + moments) * number * unpruned


def dense_state_bytes(parameters: int, *, mixed: bool = True, moments: int = 2, number: int = 4) -> int:
    """All state of dense training in the same precision, where mixed has 16-bit weights and gradients besides."""
    return parameters * ((2 + moments) * number + (2 * HALF.itemsize if mixed else 0))


def wire_bytes(
    pruned: int, unpruned: int, sparsity: float, *, replicas: int, mixed: bool = True, number: int = 4
) -> int:
    """What all replicas together hand to all-reduce in a step; one replica has nobody to send to."""
    kept = round(pruned * (1.0 - sparsity))
    return replicas * ((HALF.itemsize if mixed else number) * kept + number * unpruned) if replicas > 1 else 0


# Stages


@dataclass(frozen=True)
class StagesNeeded:
    """The fewest devices on which a network fits in stages; None: it does not, on however many."""

    pruned: int | None
    dense: int | None


def stages_needed(
    prospect: Prospect, layers: Mapping[str, Layer], room: int, *, mixed: bool, microbatches: int, order: str = "1f1b"
) -> StagesNeeded:
    """How many stages a network needs with `room` bytes on each device, pruned and in dense training.

    `prospect` has the costs of the dense network for one micro-batch. In mixed precision activations are taken to be as
    large as in full, which is a little more than they are.
    """
    pruned = compressed(prospect, layers, mixed=mixed, resident=True)
    return StagesNeeded(
        fewest_devices(pruned, room, microbatches, order), fewest_devices(prospect, room, microbatches, order)
    )


def compressed(
    prospect: Prospect, layers: Mapping[str, Layer], *, mixed: bool, resident: bool, dense: StateLayout | None = None
) -> Prospect:
    """The costs of a network whose state is compressed to its survivors.

    `resident`: on a device for good, gradients too, as in stages. Else, as in shards, a gradient waits only where the
    step comes after all of a batch's backward (`deferred`). `dense` is what optimizers keep of a dense network, where
    the profile does not say.
    """
    kinds = prospect.profile.state if dense is None else dense
    measured = HALF if prospect.captured.program.mixed else None
    owned: set[str] = set()
    nodes = []
    for node, cost in zip(prospect.captured.nodes, prospect.profile.nodes, strict=True):
        used = {name: layers[name] for name in node.parameters if name in layers}
        own = {name: layer for name, layer in used.items() if name not in owned}
        owned |= own.keys()
        if used:
            waits = resident or prospect.deferred
            counted = {name: _bytes(prospect.profile.state.get(name, {})) for name in own}
            cost = _with_steps(_with_state(cost, own, kinds, counted, measured, mixed, resident), used, waits)
        nodes.append(cost)
    state = {
        name: _survivors_state(kinds.get(name, {}), layers[name], mixed) if name in layers else kept
        for name, kept in prospect.profile.state.items()
    }
    pruned = Pruned({name: layer.survivors for name, layer in layers.items()}, mixed)
    return replace(prospect, profile=replace(prospect.profile, nodes=tuple(nodes), state=state), pruned=pruned)


def _with_state(
    cost: NodeCost, own: Mapping[str, Layer], kinds: StateLayout, counted: Mapping[str, int],
    measured: torch.dtype | None, mixed: bool, resident: bool,
) -> NodeCost:  # fmt: skip
    """A node's costs with the weights it computes with, and all else of those that it owns compressed."""
    weights, optimizer, gradients = cost.parameter_bytes, cost.optimizer_bytes, cost.parameter_bytes
    for name, layer in own.items():
        before = aligned(layer.weights * (measured or layer.dtype).itemsize)
        kept, wide = layer.survivors, torch.float32 if mixed else layer.dtype
        weights += aligned(layer.weights * (HALF if mixed else layer.dtype).itemsize) - before
        optimizer += _bytes(_survivors_state(kinds.get(name, {}), layer, mixed)) - counted[name]
        optimizer += aligned(kept * INDEX_BYTES) + (aligned(kept * wide.itemsize) if mixed else 0)
        # Where all stays, mixed precision has the gradient in both types, and the new weights in the narrow one.
        each = wide.itemsize + (2 * HALF.itemsize if mixed and resident else 0)
        gradients += aligned(kept * each) - before
    return replace(
        cost, parameter_bytes=weights, optimizer_bytes=optimizer, compressed_gradient_bytes=gradients
    )  # fmt: skip


def _with_steps(cost: NodeCost, used: Mapping[str, Layer], waits: bool) -> NodeCost:
    """The same with what gathering and a step take for a moment: a dense gradient too, where none is counted yet."""
    step = max(STEP_TENSORS * layer.survivors * max(4, layer.dtype.itemsize) for layer in used.values())
    dense = cost.largest_parameter_bytes if waits else 0
    backward = cost.backward_peak_bytes if cost.stepless_peak_bytes is None else cost.stepless_peak_bytes
    return replace(cost, backward_peak_bytes=backward + dense + step)


def _survivors_state(
    kept: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], layer: Layer, mixed: bool
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The optimizer's tensors for the survivors alone."""
    return {
        key: (torch.float32 if mixed else dtype, (layer.survivors,))
        if torch.Size(shape).numel() == layer.weights else (dtype, shape)
        for key, (dtype, shape) in kept.items()
    }  # fmt: skip


def _bytes(kept: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> int:
    return sum(aligned(dtype.itemsize * torch.Size(shape).numel()) for dtype, shape in kept.values())
