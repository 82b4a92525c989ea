"""Predicted sizes of a pruned network: bytes of state, bytes of a step, and the number of stages it needs.

Pure functions of counts and measured costs, for plans and for choosing a strategy. `state.py` counts the actual tensors
of a trial, and agrees with these functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from hydra_tune.core.alignment import aligned
from hydra_tune.graph.costs import NodeCost
from hydra_tune.graph.observe import Observed
from hydra_tune.graph.program import HALF
from hydra_tune.strategies.pipeline.prepare import fewest_devices
from hydra_tune.strategies.shard.plan import PrunedParameters, StateLayout
from hydra_tune.strategies.shard.prepare import Prospect
from hydra_tune.strategies.sparse.masks import prunable, survivors

INDEX_BYTES = 4
STEP_TENSORS = 4
"""Temporary vectors of survivors in a step: weights, gradients, and the optimizer's temporaries."""


@dataclass(frozen=True)
class Layer:
    """A pruned weight."""

    weights: int
    survivors: int
    dtype: torch.dtype = torch.float32
    """Dtype in the candidate."""


def layers_of(model: nn.Module, sparsity: float, least: int = 1) -> dict[str, Layer]:
    """Return the layers that are pruned by default, with their number of survivors."""
    return {
        name: Layer(w.numel(), survivors(w.numel(), sparsity, least), w.dtype) for name, w in prunable(model).items()
    }


# Bytes


def survivor_bytes(*, mixed: bool, moments: int = 2, number: int = 4) -> int:
    """Return the bytes stored per surviving weight, in addition to the weight the model computes with.

    `moments` is the number of optimizer tensors (2 for Adam), `number` the bytes of one of the candidate's own numbers.
    """
    if not mixed:
        return INDEX_BYTES + number + moments * number
    half, wide = HALF.itemsize, 4
    return INDEX_BYTES + half + wide + wide + moments * wide + half


def state_bytes(
    pruned: int, unpruned: int, sparsity: float, *, mixed: bool = True, moments: int = 2, number: int = 4
) -> int:
    """Return the bytes of all state on a device, for the given counts of pruned and unpruned parameters.

    If a network is on several devices in stages, the counts are those of one device's parameters.
    """
    kept = round(pruned * (1.0 - sparsity))
    return counted_bytes(pruned, kept, unpruned, mixed=mixed, moments=moments, number=number)


def counted_bytes(pruned: int, kept: int, unpruned: int, *, mixed: bool, moments: int = 2, number: int = 4) -> int:
    """Return the bytes of all state for a number of survivors."""
    compute = HALF.itemsize if mixed else number
    left = kept * survivor_bytes(mixed=mixed, moments=moments, number=number)
    return compute * pruned + left + (2 + moments) * number * unpruned


def dense_state_bytes(parameters: int, *, mixed: bool = True, moments: int = 2, number: int = 4) -> int:
    """Return the bytes of dense training's state; mixed precision adds 16-bit weights and gradients."""
    return parameters * ((2 + moments) * number + (2 * HALF.itemsize if mixed else 0))


def wire_bytes(
    pruned: int, unpruned: int, sparsity: float, *, replicas: int, mixed: bool = True, number: int = 4
) -> int:
    """Return the bytes that all replicas together pass to all-reduce in a step; 0 for one replica."""
    kept = round(pruned * (1.0 - sparsity))
    return replicas * ((HALF.itemsize if mixed else number) * kept + number * unpruned) if replicas > 1 else 0


# Stages


@dataclass(frozen=True)
class StagesNeeded:
    """The fewest devices on which a network fits in stages; None if no number suffices."""

    pruned: int | None
    dense: int | None


def stages_needed(
    prospect: Prospect, layers: Mapping[str, Layer], room: int, *, mixed: bool, microbatches: int, order: str = "1f1b"
) -> StagesNeeded:
    """Return the number of stages a network needs with `room` bytes per device, pruned and dense.

    `prospect` has the costs of the dense network for one micro-batch. In mixed precision activations are assumed to be
    as large as in full precision, which is slightly too much.
    """
    pruned = compressed(prospect, layers, mixed=mixed, resident=True)
    return StagesNeeded(
        fewest_devices(pruned, room, microbatches, order), fewest_devices(prospect, room, microbatches, order)
    )


def compressed(
    prospect: Prospect, layers: Mapping[str, Layer], *, mixed: bool, resident: bool, dense: StateLayout | None = None
) -> Prospect:
    """Return the costs of a network whose state is compressed to its survivors.

    `resident`: all state stays on a device, gradients included, as in stages. Otherwise, as in shards, a gradient is
    kept only if the step comes after the whole backward of a batch (`deferred`). `dense` is the optimizer state of the
    dense network, if the profile does not have it.
    """
    kinds = prospect.profile.state if dense is None else dense
    measured = HALF if prospect.captured.mixed else None
    owned: set[str] = set()
    nodes = []
    parameters = [node.parameters for node in prospect.captured.nodes]
    for names, cost in zip(parameters, prospect.profile.nodes, strict=True):
        used = {name: layers[name] for name in names if name in layers}
        own = {name: layer for name, layer in used.items() if name not in owned}
        owned |= own.keys()
        if used:
            # Costs of an observed model have room for the gradient that arrives beside those that wait.
            waits = resident or (prospect.deferred and not isinstance(prospect.captured, Observed))
            counted = {name: _bytes(prospect.profile.state.get(name, {})) for name in own}
            cost = _with_steps(_with_state(cost, own, kinds, counted, measured, mixed, resident), used, waits)
        nodes.append(cost)
    state = {
        name: _survivors_state(kinds.get(name, {}), layers[name], mixed) if name in layers else kept
        for name, kept in prospect.profile.state.items()
    }
    pruned = PrunedParameters({name: layer.survivors for name, layer in layers.items()}, mixed)
    return replace(prospect, profile=replace(prospect.profile, nodes=tuple(nodes), state=state), pruned=pruned)


def _with_state(
    cost: NodeCost, own: Mapping[str, Layer], kinds: StateLayout, counted: Mapping[str, int],
    measured: torch.dtype | None, mixed: bool, resident: bool,
) -> NodeCost:  # fmt: skip
    """Return a node's costs with compressed state for the weights it owns."""
    weights, optimizer, gradients = cost.parameter_bytes, cost.optimizer_bytes, cost.parameter_bytes
    for name, layer in own.items():
        before = aligned(layer.weights * (measured or layer.dtype).itemsize)
        kept, wide = layer.survivors, torch.float32 if mixed else layer.dtype
        weights += aligned(layer.weights * (HALF if mixed else layer.dtype).itemsize) - before
        optimizer += _bytes(_survivors_state(kinds.get(name, {}), layer, mixed)) - counted[name]
        optimizer += aligned(kept * INDEX_BYTES) + (aligned(kept * wide.itemsize) if mixed else 0)
        # Resident mixed precision keeps the gradient in both types, and the new weights in 16 bits.
        each = wide.itemsize + (2 * HALF.itemsize if mixed and resident else 0)
        gradients += aligned(kept * each) - before
    return replace(
        cost, parameter_bytes=weights, optimizer_bytes=optimizer, compressed_gradient_bytes=gradients
    )  # fmt: skip


def _with_steps(cost: NodeCost, used: Mapping[str, Layer], waits: bool) -> NodeCost:
    """Return a node's costs with the temporary bytes of gathering and stepping; `waits` adds a dense gradient."""
    step = max(STEP_TENSORS * layer.survivors * max(4, layer.dtype.itemsize) for layer in used.values())
    dense = cost.largest_parameter_bytes if waits else 0
    backward = cost.backward_peak_bytes if cost.stepless_peak_bytes is None else cost.stepless_peak_bytes
    held = None if cost.backward_held_bytes is None else cost.backward_held_bytes + dense + step
    return replace(cost, backward_peak_bytes=backward + dense + step, backward_held_bytes=held)


def _survivors_state(
    kept: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], layer: Layer, mixed: bool
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the layout of the optimizer's tensors for the survivors alone."""
    return {
        key: (torch.float32 if mixed else dtype, (layer.survivors,))
        if torch.Size(shape).numel() == layer.weights else (dtype, shape)
        for key, (dtype, shape) in kept.items()
    }  # fmt: skip


def _bytes(kept: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> int:
    return sum(aligned(dtype.itemsize * torch.Size(shape).numel()) for dtype, shape in kept.values())
