"""Costs of a model's nodes, and of a shard, a contiguous range of nodes, on a device.

The costs come from one pilot batch, of a recorded model (`profile.py`) or of an observed one (`observe.py`). This
module only adds them up, and writes and reads them as JSON, since profiles are kept on disk. A shard is judged by its
backward, which holds the most: state, activations, both boundaries and gradients meet there. In an observed model
boundaries count as zero bytes, because values pass from node to node inside the user's own forward; buffers count in
the peaks, because they stay on the device.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class NodeCost:
    """Cost of one node of a recorded or observed model, as the pilot batch measured it; nodes are in execution
    order."""

    name: str
    forward_seconds: float
    backward_seconds: float
    step_seconds: float
    parameter_bytes: int
    """Bytes of the parameters that this node uses first: it owns them."""
    optimizer_bytes: int
    """Bytes of optimizer state for the parameters that this node owns."""
    buffer_bytes: int
    largest_parameter_bytes: int
    """Bytes of its largest parameter. Gradients are consumed parameter by parameter, so only one at a time takes
    memory."""
    activation_bytes: int
    """Bytes that its forward saves for its backward."""
    forward_peak_bytes: int
    """Most bytes that its forward takes at once, beyond the saved activations."""
    backward_peak_bytes: int
    """Most bytes that its backward takes at once, including the gradient of its inputs, which it hands on at the
    end."""
    boundary_bytes: int
    """Bytes of all values that cross a cut right after this node, residual links too; zero in an observed model."""
    saved_input_bytes: int = 0
    """Bytes of saved activations that came in from the node before: at a cut, the boundary itself."""
    cut_allowed: bool = True
    """True if a cut right after this node is possible."""
    preferred: bool = False
    """True if the user named this node as a split point."""
    tied: Mapping[str, int] = field(default_factory=dict)
    """Bytes, by name, of the parameters that an earlier node owns and this one uses too."""
    shared: Mapping[str, int] = field(default_factory=dict)
    """Bytes, by name, of the parameters that this node owns and later ones have in `tied`. Where owner and user are in
    one shard, the parameter is there once; a tied parameter that no node lists here counts as owned by another
    shard."""
    compressed_gradient_bytes: int | None = None
    """Bytes of its own parameters' gradients where they are stored for some of the weights only; else None."""
    stepless_peak_bytes: int | None = None
    """Most bytes that its backward takes at once without its parameters' optimizer steps; None if not measured."""
    unsaved_bytes: int | None = None
    """Most bytes alive in its forward that autograd had not saved by then; None unless the model is observed."""
    forward_live_bytes: int | None = None
    """Most bytes alive in its forward, saved tensors included while user code holds them; None unless observed."""
    backward_held_bytes: int | None = None
    """Most bytes alive in its backward, with the saved tensors in use at that moment; None unless observed."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of its own parameters' gradients while they wait for an optimizer step."""
        return self.parameter_bytes if self.compressed_gradient_bytes is None else self.compressed_gradient_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of its own parameters, their gradients, their optimizer state and its buffers."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.buffer_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes that its forward or its backward takes at once, beyond state and saved activations."""
        return max(self.forward_peak_bytes, self.backward_peak_bytes)

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds + self.step_seconds


def as_json(nodes: Iterable[NodeCost]) -> str:
    """Return the costs as one JSON text."""
    return json.dumps([dataclasses.asdict(node) for node in nodes])


def from_json(text: str) -> tuple[NodeCost, ...]:
    """Return the costs that `as_json` wrote; raise ValueError for any other text, such as another version's."""
    rows: Any = json.loads(text)
    try:
        return tuple(NodeCost(**row) for row in rows)
    except TypeError as error:
        raise ValueError(f"these are no costs of nodes: {error}") from error


_OF_A_BATCH = (
    "activation_bytes", "forward_peak_bytes", "backward_peak_bytes", "boundary_bytes", "unsaved_bytes",
    "forward_live_bytes", "backward_held_bytes",
)  # fmt: skip
"""Fields of `NodeCost` that depend on the shape of the batch."""


def covering(one: NodeCost, other: NodeCost) -> NodeCost:
    """Return a node's cost that covers either of two batches; the first one's seconds where it takes no less memory."""
    sizes, others = ([getattr(cost, name) or 0 for name in _OF_A_BATCH] for cost in (one, other))
    if all(a >= b for a, b in zip(sizes, others, strict=True)):
        return one
    if all(a <= b for a, b in zip(sizes, others, strict=True)):
        return other
    most: Any = {name: max(a, b) for name, a, b in zip(_OF_A_BATCH, sizes, others, strict=True)}
    peaks = [cost.stepless_peak_bytes for cost in (one, other) if cost.stepless_peak_bytes is not None]
    # What came in and is saved comes off what a shard takes: the less of it, the more that is.
    least = min(one.saved_input_bytes, other.saved_input_bytes)
    return dataclasses.replace(one, saved_input_bytes=least, stepless_peak_bytes=max(peaks, default=None), **most)


def at_least(node: NodeCost) -> NodeCost:
    """Return an observed node's cost where all activations are spilled but those that are in use at the moment."""
    if not node.forward_live_bytes or not node.backward_held_bytes:
        return node
    return dataclasses.replace(
        node, activation_bytes=0, forward_peak_bytes=node.forward_live_bytes,
        backward_peak_bytes=node.backward_held_bytes,
    )  # fmt: skip


def judging(one: NodeCost, other: NodeCost) -> NodeCost:
    """Return the cost `one` raised to cover the evaluation of another batch, which saves nothing for a backward."""
    most: Any = {
        name: max(getattr(one, name) or 0, getattr(other, name) or 0)
        for name in ("forward_peak_bytes", "boundary_bytes", "unsaved_bytes", "forward_live_bytes")
        if getattr(one, name) is not None or getattr(other, name) is not None
    }
    return dataclasses.replace(one, **most)


@dataclass(frozen=True, kw_only=True)
class ShardCost:
    """Cost of the nodes `start` to `stop` (exclusive) as one shard."""

    start: int
    stop: int
    forward_seconds: float
    backward_seconds: float
    """Seconds of the backward, without recomputing the forward."""
    step_seconds: float
    parameter_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    tied_bytes: int
    """Bytes of other shards' parameters that this one uses: copies, never written by it."""
    activation_bytes: int
    in_bytes: int
    """Bytes that come in over the cut before it; the batch's bytes for the first shard."""
    out_bytes: int
    """Bytes that go out in its forward and come back as gradients in its backward, when the values themselves may be
    spilled. Gradients of its inputs are made by the backward, and count there."""
    gradient_bytes: int
    forward_working_bytes: int
    """Most bytes that its forward takes at once, beyond activations."""
    backward_working_bytes: int
    unsaved_bytes: int = 0
    """Most bytes alive in its forward that autograd had not saved by then; zero unless the model is observed."""
    forward_live_bytes: int = 0
    """Most bytes alive in its forward, saved tensors included while user code holds them; zero unless observed."""
    backward_held_bytes: int = 0
    """Most bytes alive in its backward, with the saved tensors in use at that moment; zero unless observed."""

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds + self.step_seconds

    @property
    def state_bytes(self) -> int:
        """Bytes that this shard owns and carries from batch to batch, and that are spilled and brought in again."""
        return self.parameter_bytes + self.optimizer_bytes + self.buffer_bytes

    @property
    def device_bytes(self) -> int:
        """Most bytes that its backward holds on a device."""
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
    """Return the cost of the nodes `start` to `stop` (exclusive) as one shard.

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
        unsaved_bytes=max(node.unsaved_bytes or 0 for node in own),
        forward_live_bytes=max(node.forward_live_bytes or 0 for node in own),
        backward_held_bytes=max(node.backward_held_bytes or 0 for node in own),
    )
