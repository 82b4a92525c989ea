"""Which operations, parameters and buffers belong to which shard, and in which blocks they lie: data, no tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hydra_tune.graph.capture import Captured
from hydra_tune.graph.costs import ShardCost
from hydra_tune.shards.layout import Layout

StateLayout = Mapping[str, Mapping[str, tuple[torch.dtype, tuple[int, ...]]]]
"""For each parameter, the dtype and shape of each tensor of its optimizer state."""


@dataclass(frozen=True)
class Pruned:
    """Parameters of which only some weights are trained: gradients and optimizer state are stored for those alone."""

    survivors: Mapping[str, int]
    """How many weights of each."""
    mixed: bool
    """Whether the model computes with 16-bit weights, beside which the survivors' own are kept in float32."""

    def master(self, compute: torch.dtype) -> torch.dtype:
        """The type in which survivors are kept, for the one that the model computes in."""
        return torch.float32 if self.mixed else compute


NOT_PRUNED = Pruned({}, mixed=False)


def index_of(name: str) -> str:
    """What a parameter's survivors' positions are called among a trial's tensors."""
    return f"{name}/index"


def master_of(name: str) -> str:
    """What a parameter's survivors are called among a trial's tensors, where the model computes with others."""
    return f"{name}/master"


@dataclass(frozen=True)
class Bundle:
    """Parameters that are moved and updated together: those of one shard alone, or one that several shards share."""

    name: str
    weights: Layout
    optimizer: Mapping[str, Layout]
    """By the block's key: one block for each tensor that the optimizer keeps of a parameter (Adam's two moments).

    Each is as large as the weights, as a rule: a buffer that was one's serves the other as it is.
    """
    users: tuple[int, ...]
    """The shards that use it. The first one comes last in the backward pass, and makes the step."""
    gradients: Layout
    """As they wait for a step."""
    survivors: Mapping[str, Layout]
    """By the block's key: where pruned weights have their survivors, and in mixed precision the survivors."""

    @property
    def owner(self) -> int:
        """The shard that makes the step; -1 for parameters that no operation uses."""
        return self.users[0] if self.users else -1

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.weights.fields)

    @property
    def pruned(self) -> frozenset[str]:
        """Parameters of which only some weights are trained."""
        fields = [field.name for layout in self.survivors.values() for field in layout.fields]
        return frozenset(name for name in self.parameters if index_of(name) in fields)

    @property
    def state_bytes(self) -> int:
        """All of it but for gradients."""
        return self.weights.size + sum(each.size for each in (*self.optimizer.values(), *self.survivors.values()))


class Blocks(Protocol):
    """What of a trial's state lies in which block."""

    @property
    def bundles(self) -> tuple[Bundle, ...]: ...

    @property
    def buffers(self) -> Mapping[str, Layout]: ...


@dataclass(frozen=True)
class Shard:
    """A run of operations with what it needs."""

    index: int
    start: int
    stop: int
    bundles: tuple[Bundle, ...]
    buffers: Layout
    cost: ShardCost
    takes: tuple[int, ...]
    """The values that it takes from earlier shards or from the batch."""
    gives: tuple[int, ...]
    """The values that it makes for later shards or for the loss."""


@dataclass(frozen=True)
class Plan:
    """All shards of a trial."""

    shards: tuple[Shard, ...]
    bundles: tuple[Bundle, ...]
    deferred: bool
    """Whether steps are made apart from the backward pass, once all gradients are there."""
    state_bytes: int

    @property
    def steps_a_batch(self) -> int:
        return 2 * len(self.shards) - 1

    @property
    def buffers(self) -> dict[str, Layout]:
        """By the block's key: the buffers of each shard."""
        return {f"b/{shard.index}": shard.buffers for shard in self.shards}


def make_plan(
    captured: Captured,
    costs: Sequence[ShardCost],
    tensors: Mapping[str, torch.Tensor],
    state: StateLayout,
    *,
    deferred: bool,
    pruned: Pruned = NOT_PRUNED,
) -> Plan:
    """The shards of a partition; `tensors` has every parameter and buffer by name, for its dtype and shape."""
    users: dict[str, list[int]] = {}
    buffers: list[dict[str, None]] = [{} for _ in costs]
    for index, cost in enumerate(costs):
        for node in captured.nodes[cost.start : cost.stop]:
            for name in node.parameters:
                if index not in users.setdefault(name, []):
                    users[name].append(index)
            buffers[index] |= dict.fromkeys(node.buffers)
    for name, tensor in tensors.items():
        # What no operation uses is part of the model all the same: parameters lie in a bundle that goes to no device,
        # buffers, which are small, with the first shard.
        if isinstance(tensor, torch.nn.Parameter):
            users.setdefault(name, [])
        elif not any(name in each for each in buffers):
            buffers[0][name] = None
    bundles = bundles_of(users, tensors, state, pruned)
    shards = []
    program = captured.program
    for index, cost in enumerate(costs):
        start, stop = captured.nodes[cost.start].start, captured.nodes[cost.stop - 1].stop
        last = index == len(costs) - 1
        used = {value for op in program.training[start:stop] for value in op.refs()}
        # The loss is computed with the last shard, from whatever the model's output is made of.
        used |= program.crossing(stop) if last else set()
        made = program.value_of(start)
        shards.append(
            Shard(
                index, start, stop, tuple(bundle for bundle in bundles if index in bundle.users),
                Layout.of((name, tensors[name].dtype, tuple(tensors[name].shape)) for name in buffers[index]), cost,
                takes=tuple(sorted(value for value in used if value < made)),
                gives=() if last else tuple(sorted(value for value in program.crossing(stop) if value >= made)),
            )
        )  # fmt: skip
    size = sum(bundle.state_bytes for bundle in bundles)
    return Plan(tuple(shards), bundles, deferred, size + sum(shard.buffers.size for shard in shards))


def bundles_of(
    users: Mapping[str, Sequence[int]], tensors: Mapping[str, torch.Tensor], state: StateLayout,
    pruned: Pruned = NOT_PRUNED,
) -> tuple[Bundle, ...]:  # fmt: skip
    """Parameters with the same users together: one bundle a shard, and one for each set of shards that share."""
    together: dict[tuple[int, ...], list[str]] = {}
    for name, shards in users.items():
        together.setdefault(tuple(sorted(shards)), []).append(name)
    bundles = []
    for shards, names in together.items():
        own = "-".join(map(str, shards)) or "unused"
        weights = Layout.of((name, tensors[name].dtype, tuple(tensors[name].shape)) for name in names)
        gradients = Layout.of(_gradient(name, tensors[name], pruned) for name in names)
        survivors = _survivor_blocks(own, {name: tensors[name] for name in names}, pruned)
        bundles.append(Bundle(own, weights, _optimizer_blocks(own, names, state), shards, gradients, survivors))
    return tuple(bundles)


def _gradient(name: str, tensor: torch.Tensor, pruned: Pruned) -> tuple[str, torch.dtype, tuple[int, ...]]:
    if name in pruned.survivors:
        return name, pruned.master(tensor.dtype), (pruned.survivors[name],)
    return name, tensor.dtype, tuple(tensor.shape)


def _survivor_blocks(bundle: str, tensors: Mapping[str, torch.Tensor], pruned: Pruned) -> dict[str, Layout]:
    """Positions in one block and survivors in another: a backward needs the first, a step both."""
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
