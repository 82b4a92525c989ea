"""Assigns operations, parameters and buffers to shards and to blocks: data, no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hydra_tune.graph.costs import ShardCost
from hydra_tune.graph.observe import Observed, ObservedNode
from hydra_tune.spill.layout import Layout
from hydra_tune.strategies.shard.path import shards_of_nodes, users_of

BUFFERS = "b/all"
"""Key of the block with a model's buffers."""
StateLayout = Mapping[str, Mapping[str, tuple[torch.dtype, tuple[int, ...]]]]
"""Type: for each parameter, the dtype and shape of each tensor of its optimizer state."""


@dataclass(frozen=True)
class PrunedParameters:
    """Parameters with only some weights trained; gradients and optimizer state are stored for those, the survivors."""

    survivors: Mapping[str, int]
    """Number of weights of each parameter that are trained."""
    mixed: bool
    """True if the model computes with 16-bit weights; the survivors' float32 weights are then kept beside them."""

    def master(self, compute: torch.dtype) -> torch.dtype:
        """Return the dtype of the survivors' own weights, for a model that computes in the dtype `compute`."""
        return torch.float32 if self.mixed else compute


NOT_PRUNED = PrunedParameters({}, mixed=False)


def index_of(name: str) -> str:
    """Return the name of the tensor with the positions of a parameter's survivors."""
    return f"{name}/index"


def master_of(name: str) -> str:
    """Return the name of the tensor with a parameter's float32 survivors, for a model that computes in 16 bits."""
    return f"{name}/master"


@dataclass(frozen=True)
class Bundle:
    """Parameters that are moved and updated together: those of one shard alone, or one that several shards share."""

    name: str
    weights: Layout
    optimizer: Mapping[str, Layout]
    """Layouts by block key: one block for each tensor that the optimizer keeps of a parameter (Adam's two moments).

    Each is as a rule as large as the weights, so that the buffer of one block can be used again for another.
    """
    users: tuple[int, ...]
    """Shards that use it. The first one comes last in the backward pass, and makes the step."""
    gradients: Layout
    """Layout of the block in which its gradients wait for a step."""
    survivors: Mapping[str, Layout]
    """Layouts by block key: the positions of pruned parameters' survivors, and in mixed precision their float32
    weights."""

    @property
    def owner(self) -> int:
        """Index of the shard that makes the step; -1 for parameters that no operation uses."""
        return self.users[0] if self.users else -1

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.weights.fields)

    @property
    def pruned(self) -> frozenset[str]:
        """Names of the parameters of which only some weights are trained."""
        fields = [field.name for layout in self.survivors.values() for field in layout.fields]
        return frozenset(name for name in self.parameters if index_of(name) in fields)

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, optimizer state and survivors, without gradients."""
        return self.weights.size + sum(each.size for each in (*self.optimizer.values(), *self.survivors.values()))


class Blocks(Protocol):
    """The blocks that a trial's state lies in."""

    @property
    def bundles(self) -> tuple[Bundle, ...]: ...

    @property
    def buffers(self) -> Mapping[str, Layout]: ...


@dataclass(frozen=True)
class PlannedShard:
    """A run of consecutive nodes, with its parameters and its cost."""

    index: int
    bundles: tuple[Bundle, ...]
    """Bundles of the parameters that its nodes use."""
    cost: ShardCost


@dataclass(frozen=True)
class Plan:
    """All shards of a trial."""

    shards: tuple[PlannedShard, ...]
    bundles: tuple[Bundle, ...]
    deferred: bool
    """True if steps are made after the backward pass, once all gradients are there."""
    state_bytes: int
    nodes: tuple[ObservedNode, ...]
    shard_of_node: tuple[int, ...]
    buffers: Mapping[str, Layout]
    """Layout by block key: the model's buffers, all in one block."""
    rewritten: frozenset[str]
    """Parameters that the forward itself changes."""
    batch_bytes: int
    """Bytes of inputs and targets of the measured batch."""

    def owned_by(self, shard: PlannedShard) -> list[Bundle]:
        """Return the bundles whose waiting steps this shard makes; the first also makes those that no shard uses."""
        return [b for b in self.bundles if b.owner == shard.index or (b.owner < 0 and shard.index == 0)]


def make_plan(
    observed: Observed,
    costs: Sequence[ShardCost],
    tensors: Mapping[str, torch.Tensor],
    state: StateLayout,
    *,
    deferred: bool,
    batch_bytes: int,
    pruned: PrunedParameters = NOT_PRUNED,
) -> Plan:
    """Return the plan for a partition; `tensors` has every parameter and buffer by name, for its dtype and shape."""
    shard_of_node = shards_of_nodes(len(observed.nodes), [(cost.start, cost.stop) for cost in costs])
    # A parameter that no operation used is part of the model all the same; its bundle is brought in on demand.
    users: dict[str, list[int]] = {name: [] for name, t in tensors.items() if isinstance(t, torch.nn.Parameter)}
    users |= users_of(observed.nodes, shard_of_node)
    bundles = bundles_of(users, tensors, state, pruned)
    shards = [
        PlannedShard(index, tuple(bundle for bundle in bundles if index in bundle.users), cost)
        for index, cost in enumerate(costs)
    ]
    buffers = Layout.of((n, t.dtype, tuple(t.shape)) for n, t in tensors.items() if n not in users)
    size = sum(bundle.state_bytes for bundle in bundles) + buffers.size
    return Plan(
        tuple(shards),
        bundles,
        deferred,
        size,
        observed.nodes,
        tuple(shard_of_node),
        {BUFFERS: buffers},
        frozenset(observed.rewritten),
        batch_bytes,
    )


def bundles_of(
    users: Mapping[str, Sequence[int]], tensors: Mapping[str, torch.Tensor], state: StateLayout,
    pruned: PrunedParameters = NOT_PRUNED,
) -> tuple[Bundle, ...]:  # fmt: skip
    """Return one bundle for each set of shards that use the same parameters, often a single shard."""
    together: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for name, shards in users.items():
        # Parameters that the pilot batch did not use may be used later, a module at a time.
        together.setdefault((tuple(sorted(shards)), "" if shards else name.rpartition(".")[0]), []).append(name)
    bundles = []
    for number, ((shards, _), names) in enumerate(together.items()):
        own = "-".join(map(str, shards)) or f"unused-{number}"
        weights = Layout.of((name, tensors[name].dtype, tuple(tensors[name].shape)) for name in names)
        gradients = Layout.of(_gradient(name, tensors[name], pruned) for name in names)
        survivors = _survivor_blocks(own, {name: tensors[name] for name in names}, pruned)
        bundles.append(Bundle(own, weights, _optimizer_blocks(own, names, state), shards, gradients, survivors))
    return tuple(bundles)


def _gradient(name: str, tensor: torch.Tensor, pruned: PrunedParameters) -> tuple[str, torch.dtype, tuple[int, ...]]:
    if name in pruned.survivors:
        return name, pruned.master(tensor.dtype), (pruned.survivors[name],)
    return name, tensor.dtype, tuple(tensor.shape)


def _survivor_blocks(bundle: str, tensors: Mapping[str, torch.Tensor], pruned: PrunedParameters) -> dict[str, Layout]:
    """Return the blocks of survivors: positions in one, weights in another. A backward needs the first, a step both."""
    kept = [(name, (pruned.survivors[name],)) for name in tensors if name in pruned.survivors]
    blocks = {f"i/{bundle}": Layout.of((index_of(name), torch.int32, shape) for name, shape in kept)}
    if pruned.mixed:
        blocks[f"m/{bundle}"] = Layout.of((master_of(name), torch.float32, shape) for name, shape in kept)
    return {key: layout for key, layout in blocks.items() if layout.size}


def _optimizer_blocks(bundle: str, names: Sequence[str], state: StateLayout) -> dict[str, Layout]:
    kinds = dict.fromkeys(kind for name in names for kind in state.get(name, {}))
    layouts = [
        Layout.of((f"{name}/{kind}", *state[name][kind]) for name in names if kind in state.get(name, {}))
        for kind in kinds
    ]
    return {f"o/{bundle}/{i}": layout for i, layout in enumerate(layouts) if layout.size}
