"""What the nodes of a captured model cost, and what a shard, a contiguous range of them, takes on a device.

The costs come from one pilot batch; this module only adds them up, and writes and reads them as JSON, since profiles
are kept on disk. A shard is judged by its backward unit, which holds the most: Hydra's units (arXiv 2110.08633)
recompute the forward inside the backward, so state, activations, both boundaries and gradients meet there.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ALIGNED = 64
"""Bytes: tensors in a block start at multiples of it, which vector instructions want and any dtype bears."""


def aligned(size: int) -> int:
    """What a tensor of `size` bytes takes in a block."""
    return -(-size // ALIGNED) * ALIGNED


@dataclass(frozen=True, kw_only=True)
class NodeCost:
    """One node of a captured model, in execution order, as the pilot batch measured it."""

    name: str
    forward_seconds: float
    backward_seconds: float
    step_seconds: float
    parameter_bytes: int
    """Parameters that this node uses first: it owns them."""
    optimizer_bytes: int
    """Optimizer state of the parameters that it owns."""
    buffer_bytes: int
    largest_parameter_bytes: int
    """Gradients are consumed parameter by parameter, so only the largest counts."""
    activation_bytes: int
    """Saved by its forward for its backward."""
    forward_peak_bytes: int
    """What its forward takes for a moment, beyond the saved activations."""
    backward_peak_bytes: int
    """What its backward takes for a moment, with the gradient of what came in, which it hands on when it is done."""
    boundary_bytes: int
    """All values that cross a cut right after this node, residual links too."""
    saved_input_bytes: int = 0
    """The part of the saved activations that came in from the node before: at a cut, the boundary itself."""
    cut_allowed: bool = True
    """Whether a cut right after this node is possible."""
    preferred: bool = False
    """The user named this as a split point."""
    tied: Mapping[str, int] = field(default_factory=dict)
    """Parameters that an earlier node owns and this one uses too: name to bytes."""
    shared: Mapping[str, int] = field(default_factory=dict)
    """Parameters that this node owns and later ones have in `tied`: where owner and user are in one shard, it is there
    once. A tied parameter that no node lists here counts as owned by another shard."""
    compressed_gradient_bytes: int | None = None
    """Of the parameters that it owns, where gradients are stored for some of their weights only."""
    stepless_peak_bytes: int | None = None
    """What its backward takes for a moment without the steps of its parameters, where that was measured."""

    @property
    def gradient_bytes(self) -> int:
        """What the gradients of its own parameters take while they wait for a step."""
        return self.parameter_bytes if self.compressed_gradient_bytes is None else self.compressed_gradient_bytes

    @property
    def state_bytes(self) -> int:
        """All that its own parameters take where everything stays: they, their gradients, optimizer and buffers."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.buffer_bytes

    @property
    def peak_bytes(self) -> int:
        """What it takes for a moment, at most."""
        return max(self.forward_peak_bytes, self.backward_peak_bytes)

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds + self.step_seconds


def as_json(nodes: Iterable[NodeCost]) -> str:
    """The costs as one JSON text."""
    return json.dumps([dataclasses.asdict(node) for node in nodes])


def from_json(text: str) -> tuple[NodeCost, ...]:
    """The costs that `as_json` wrote. Raises ValueError for any other text, such as that of another version."""
    rows: Any = json.loads(text)
    try:
        return tuple(NodeCost(**row) for row in rows)
    except TypeError as error:
        raise ValueError(f"these are no costs of nodes: {error}") from error


_OF_A_BATCH = ("activation_bytes", "forward_peak_bytes", "backward_peak_bytes", "boundary_bytes")
"""What depends on the shape of the batch."""


def covering(one: NodeCost, other: NodeCost) -> NodeCost:
    """A node's cost for whichever of two batches takes more; of equal ones the first, whose seconds stay then."""
    sizes, others = ([getattr(cost, name) for name in _OF_A_BATCH] for cost in (one, other))
    if all(a >= b for a, b in zip(sizes, others, strict=True)):
        return one
    if all(a <= b for a, b in zip(sizes, others, strict=True)):
        return other
    most = {name: max(a, b) for name, a, b in zip(_OF_A_BATCH, sizes, others, strict=True)}
    peaks = [cost.stepless_peak_bytes for cost in (one, other) if cost.stepless_peak_bytes is not None]
    # What came in and is saved comes off what a shard takes: the less of it, the more that is.
    least = min(one.saved_input_bytes, other.saved_input_bytes)
    return dataclasses.replace(one, saved_input_bytes=least, stepless_peak_bytes=max(peaks, default=None), **most)


def judging(one: NodeCost, other: NodeCost) -> NodeCost:
    """A node's cost that covers the evaluation of another batch, which keeps nothing for a backward."""
    names = ("forward_peak_bytes", "boundary_bytes")
    return dataclasses.replace(one, **{name: max(getattr(one, name), getattr(other, name)) for name in names})


@dataclass(frozen=True, kw_only=True)
class ShardCost:
    """What the nodes `start` to `stop` (exclusive) take as one shard."""

    start: int
    stop: int
    forward_seconds: float
    backward_seconds: float
    """Without recomputing the forward."""
    step_seconds: float
    parameter_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    tied_bytes: int
    """Parameters of other shards that this one uses: copies, never written by it."""
    activation_bytes: int
    in_bytes: int
    """What comes in over the cut before it; the batch, for the first shard."""
    out_bytes: int
    """What goes out in its forward, and comes back as a gradient in its backward, when the value itself may be spilled.
    The gradient of what comes in is made by the backward, and counts there."""
    gradient_bytes: int
    forward_working_bytes: int
    """What its forward takes for a moment, beyond activations."""
    backward_working_bytes: int

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds + self.step_seconds

    @property
    def state_bytes(self) -> int:
        """What this shard owns and carries from batch to batch: what is spilled and brought in again."""
        return self.parameter_bytes + self.optimizer_bytes + self.buffer_bytes

    @property
    def device_bytes(self) -> int:
        """What its backward unit holds on a device at its peak."""
        return (
            self.state_bytes
            + self.tied_bytes
            + self.activation_bytes
            + self.in_bytes
            + self.out_bytes
            + self.gradient_bytes
            + max(self.forward_working_bytes, self.backward_working_bytes)
        )


def shard_cost(
    nodes: Sequence[NodeCost], start: int, stop: int, *, deferred: bool = False, input_bytes: int = 0
) -> ShardCost:
    """The cost of one shard.

    `deferred` says that the optimizer steps after all of a batch's backward units (clipping, accumulation): then each
    shard keeps gradients for all of its parameters, instead of one parameter's at a time.
    """
    own = nodes[start:stop]
    into = nodes[start - 1].boundary_bytes if start else input_bytes
    already = min(into, own[0].saved_input_bytes) if start else 0
    out = own[-1].boundary_bytes
    parameters = sum(node.parameter_bytes for node in own)
    tied_here = {name: size for node in own for name, size in node.tied.items()}
    owned_here = {name: size for node in own for name, size in node.shared.items()}
    foreign = sum(size for name, size in tied_here.items() if name not in owned_here)
    # A tied parameter's gradient is a sum over its uses, so it waits for all of them, in this shard or in others.
    waiting = foreign if deferred else sum({**tied_here, **owned_here}.values())
    return ShardCost(
        start=start,
        stop=stop,
        forward_seconds=sum(node.forward_seconds for node in own),
        backward_seconds=sum(node.backward_seconds for node in own),
        step_seconds=sum(node.step_seconds for node in own),
        parameter_bytes=parameters,
        optimizer_bytes=sum(node.optimizer_bytes for node in own),
        buffer_bytes=sum(node.buffer_bytes for node in own),
        tied_bytes=foreign,
        activation_bytes=sum(node.activation_bytes for node in own) - already,
        in_bytes=into,
        out_bytes=out,
        gradient_bytes=waiting
        + (sum(node.gradient_bytes for node in own) if deferred else max(node.largest_parameter_bytes for node in own)),
        forward_working_bytes=max(node.forward_peak_bytes for node in own),
        backward_working_bytes=max(node.backward_peak_bytes for node in own),
    )
