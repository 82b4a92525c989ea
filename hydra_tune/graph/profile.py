"""Measures the costs of a recorded model's nodes: one pilot batch, node by node, forward and backward.

Bytes are counted as tensors are made and freed; seconds come from runs without the counting. `profile_cache.py` keeps
profiles for the trials and runs that share one.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from hydra_tune.core.alignment import aligned
from hydra_tune.core.clock import work_seconds
from hydra_tune.core.random_state import RandomState
from hydra_tune.core.tensor_memory import TensorBytes
from hydra_tune.graph.alike import kinds_of, medians
from hydra_tune.graph.capture import Captured, Node, untouched
from hydra_tune.graph.costs import NodeCost
from hydra_tune.graph.pilot_steps import PilotOptimizer, PilotSteps, StateLayout, bytes_of, gradients_aside, state_bytes

TIMED_RUNS, TIMED_SECONDS = 3, 2.0
"""Most timed runs of a pilot batch, and seconds after which no further run starts."""
_CLOCKS = ("forward_seconds", "backward_seconds", "step_seconds")


@dataclass(frozen=True)
class Profile:
    """Costs of a model's nodes for one shape of batch."""

    nodes: tuple[NodeCost, ...]
    state: StateLayout
    """Dtype and shape of each tensor of optimizer state, by parameter."""
    mutated: frozenset[int]
    """Numbers of the values that a node changes in place after another node made them."""
    input_bytes: int
    value_bytes: Mapping[int, int] = field(default_factory=dict)
    """Bytes of each value that one node makes and another one uses."""
    draws: bool = False
    """True if the forward in training draws random numbers."""
    changes_buffers: bool = False
    """True if the forward in training changes buffers, as batch-norm does."""
    in_place: frozenset[int] = frozenset()
    """Indices of the nodes in which one operation changes in place the result of another."""


def profile(
    model: nn.Module, captured: Captured, inputs: Sequence[Any], loss: Callable[[Any], torch.Tensor],
    optimizer: PilotOptimizer, preferred: Sequence[str] = (), timed_in: AbstractContextManager[Any] | None = None,
) -> Profile:  # fmt: skip
    """Measure every node; `inputs` are the program's, `loss` takes the model's output.

    Timed runs happen inside the context manager `timed_in`, if given.
    """
    pilot = _Pilot(model, captured, loss, optimizer)
    with gradients_aside(model):
        with untouched(model):
            model.train()
            counted = pilot.run(inputs, counting=True)
        with timed_in or nullcontext():
            timed = _timed(pilot, inputs, counted)
        pilot.steps.prepare_others()
    owners = _owners(captured.nodes)
    sizes = {name: aligned(p.numel() * p.element_size()) for name, p in model.named_parameters()}
    buffers = {name: aligned(b.numel() * b.element_size()) for name, b in model.named_buffers()}
    tied = {name for index, node in enumerate(captured.nodes) for name in node.parameters if owners[name] != index}
    nodes = []
    for index, node in enumerate(captured.nodes):
        count, clock = counted[index], timed[index]
        own = [name for name in node.parameters if owners[name] == index]
        nodes.append(
            NodeCost(
                name=node.name, forward_seconds=clock.forward_seconds,
                backward_seconds=max(0.0, clock.backward_seconds - clock.step_seconds), step_seconds=clock.step_seconds,
                parameter_bytes=sum(sizes[name] for name in own),
                optimizer_bytes=sum(state_bytes(pilot.steps.state.get(name, {})) for name in own),
                buffer_bytes=sum(buffers[name] for name in node.buffers),
                largest_parameter_bytes=max((sizes[name] for name in node.parameters), default=0),
                activation_bytes=count.activation_bytes, forward_peak_bytes=count.forward_peak_bytes,
                backward_peak_bytes=count.backward_peak_bytes, stepless_peak_bytes=count.stepless_peak_bytes,
                boundary_bytes=count.boundary_bytes,
                saved_input_bytes=count.saved_input_bytes,
                cut_allowed=pilot.cut_allowed_after(index)
                and not _buffers_shared_after(captured.nodes, index, pilot.changed_buffers),
                preferred=any(node.name == point or node.name.startswith(point + ".") for point in preferred),
                tied={name: sizes[name] for name in node.parameters if owners[name] != index},
                shared={name: sizes[name] for name in own if name in tied},
            )
        )  # fmt: skip
    return Profile(
        tuple(nodes), pilot.steps.state, frozenset(pilot.mutated_in), bytes_of(inputs), pilot.value_bytes, pilot.draws,
        bool(pilot.changed_buffers), frozenset(pilot.in_place),
    )  # fmt: skip


def _timed(pilot: _Pilot, inputs: Sequence[Any], counted: Sequence[_Measured]) -> list[_Measured]:
    """Return measurements whose seconds are medians over alike nodes and a few runs; a large model is run once."""
    runs: list[list[_Measured]] = []
    began = time.perf_counter()
    while not runs or (len(runs) < TIMED_RUNS and time.perf_counter() - began < TIMED_SECONDS):
        with untouched(pilot.model):
            pilot.model.train()
            runs.append(pilot.run(inputs, counting=False))
    sizes = [(count.activation_bytes, count.forward_peak_bytes, count.backward_peak_bytes) for count in counted]
    kinds = kinds_of(pilot.model, pilot.captured, sizes)
    forward, backward, step = (
        medians(kinds, [[getattr(one, name) for one in run] for run in runs]) for name in _CLOCKS
    )
    return [
        replace(one, forward_seconds=forward[index], backward_seconds=backward[index], step_seconds=step[index])
        for index, one in enumerate(runs[-1])
    ]


def _owners(nodes: Sequence[Node]) -> dict[str, int]:
    """Return for each parameter the index of the first node that uses it."""
    owners: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in node.parameters:
            owners.setdefault(name, index)
    return owners


def _buffers_shared_after(nodes: Sequence[Node], index: int, changed: set[str]) -> bool:
    """True if a buffer that changes is used on both sides of the cut after a node: each shard would have its own."""
    before = {name for node in nodes[: index + 1] for name in node.buffers} & changed
    return any(name in before for node in nodes[index + 1 :] for name in node.buffers)


@dataclass
class _Measured:
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    step_seconds: float = 0.0
    activation_bytes: int = 0
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    stepless_peak_bytes: int = 0
    boundary_bytes: int = 0
    saved_input_bytes: int = 0


class _Pilot:
    """Runs one batch through all nodes, each with its own little autograd graph."""

    def __init__(
        self, model: nn.Module, captured: Captured, loss: Callable[[Any], torch.Tensor], optimizer: PilotOptimizer
    ) -> None:
        self.model = model
        self.captured = captured
        self.program = captured.program
        self.loss = loss
        self.steps = PilotSteps(model, optimizer)
        self.mutated_in: dict[int, int] = {}
        """Index of the first node that changes a value in place, for values that an earlier node made."""
        self.changed_buffers: set[str] = set()
        """Names of the buffers that the forward changes or replaces by another tensor."""
        self.value_bytes: dict[int, int] = {}
        self.draws = False
        self.in_place: set[int] = set()
        self._crossing: dict[int, _Crossing] = {}

    def run(self, inputs: Sequence[Any], *, counting: bool) -> list[_Measured]:
        measured = []
        values: dict[int, Any] = dict(enumerate(inputs))
        saved = _SavedBytes([*self.model.parameters(), *self.model.buffers(), *_tensors(inputs)])
        before = {name: (buffer, buffer._version) for name, buffer in self.model.named_buffers()}
        streams = RandomState.capture()
        for index, node in enumerate(self.captured.nodes):
            last = index == len(self.captured.nodes) - 1
            facts, values = self._run_node(index, node, values, saved, last=last, counting=counting)
            measured.append(facts)
        for name, buffer in self.model.named_buffers():
            if name not in before or before[name][0] is not buffer or before[name][1] != buffer._version:
                self.changed_buffers.add(name)
        self.draws |= not streams.same_as(RandomState.capture())
        return measured

    def _run_node(
        self, index: int, node: Node, values: dict[int, Any], saved: _SavedBytes, *, last: bool, counting: bool
    ) -> tuple[_Measured, dict[int, Any]]:
        facts = _Measured()
        entered = {value: tree_map(_entering, tree) for value, tree in values.items()}
        given = [(value, tensor, tensor._version) for value, tree in entered.items() for tensor in _tensors(tree)]
        counter = TensorBytes([*self.model.parameters(), *self.model.buffers(), *_tensors(values)])
        there = counter.live
        saved.begin(_tensors(values))
        clock = work_seconds()
        if counting:
            with counter, saved_tensors_hooks(saved.pack, lambda tensor: tensor):
                total = self._watched_forward(index, node, entered, last)
        else:
            total = self._forward(node, entered, last)
        facts.forward_seconds = work_seconds() - clock
        after = {value: entered[value] for value in self.program.crossing(node.stop)}
        facts.activation_bytes, facts.saved_input_bytes = saved.total, saved.total - saved.made
        facts.boundary_bytes = bytes_of(list(after.values()))
        self.value_bytes |= {value: bytes_of(tree) for value, tree in after.items()}
        facts.forward_peak_bytes = max(0, counter.peak - there - saved.made)
        for value, tensor, version in given:
            if tensor._version != version:
                self.mutated_in.setdefault(value, index)
        del given
        self._crossing[index] = _Crossing.of(after)
        floor = counter.live
        peak, steps = self._backward(total, after, last, counter, counting)
        facts.step_seconds, facts.backward_seconds = steps.seconds, steps.backward_seconds
        spared = max((p.numel() * p.element_size() for p in self._parameters(node)), default=0)
        facts.stepless_peak_bytes = max(0, peak - floor - spared)
        facts.backward_peak_bytes = max(0, max(peak, steps.peak) - floor - spared)
        return facts, {value: tree_map(_detached, tree) for value, tree in after.items()}

    def _watched_forward(self, index: int, node: Node, entered: dict[int, Any], last: bool) -> Any:
        """Run a node's forward; note it in `in_place` if an operation changes in place the result of another."""
        for op in range(node.start, node.stop):
            # Weakly: a value that is let go is to be free at once, as in any other run.
            before = [(weakref.ref(tensor), tensor._version) for tensor in _tensors(entered)]
            self.program.run(self.model, entered, op, op + 1, training=True)
            if any((tensor := known()) is not None and tensor._version != version for known, version in before):
                self.in_place.add(index)
        return self._outcome(entered, last)

    def _forward(self, node: Node, entered: dict[int, Any], last: bool) -> Any:
        self.program.run(self.model, entered, node.start, node.stop, training=True)
        return self._outcome(entered, last)

    def _outcome(self, entered: dict[int, Any], last: bool) -> Any:
        return self.loss(self.program.outputs(entered)) if last else None

    def _backward(
        self, total: Any, after: Mapping[int, Any], last: bool, counter: TensorBytes, counting: bool
    ) -> tuple[int, _StepClock]:
        """Run a node's backward with its steps; return the most live bytes without steps, and the clock."""
        clock = _StepClock()
        roots = [total] if last else [t for t in _tensors(after) if t.grad_fn is not None]
        if not roots or not any(root.requires_grad for root in roots):
            return 0, clock
        gradients = [torch.ones_like(root) for root in roots]
        counter.peak = counter.live
        began = work_seconds()
        with self.steps.made(counter, clock.add), counter if counting else nullcontext():
            torch.autograd.backward(roots, gradients)
        clock.backward_seconds = work_seconds() - began - clock.apart
        return counter.peak, clock

    def cut_allowed_after(self, index: int) -> bool:
        """True if the values that cross a cut after this node can be handed on; known once all nodes have run.

        A shard that changes a value in place works on a copy of its own. So no later shard may use that value, nor
        another value that shares its storage.
        """
        crossing = self._crossing[index]
        changed = {value for value, node in self.mutated_in.items() if node <= index}
        return crossing.plain and not changed & crossing.values and not crossing.shared(self.mutated_in)

    def _parameters(self, node: Node) -> list[torch.Tensor]:
        own = dict(self.model.named_parameters())
        return [own[name] for name in node.parameters]


@dataclass
class _StepClock:
    """Sums over the optimizer steps of one node's parameters."""

    peak: int = 0
    """Most bytes of all live tensors during a step."""
    seconds: float = 0.0
    backward_seconds: float = 0.0
    """Seconds of the backward with its steps."""
    apart: float = 0.0
    """Seconds spent on preparing the steps, which a real run does not do."""

    def add(self, seconds: float, apart: float, peak: int) -> None:
        self.seconds += seconds
        self.apart += apart
        self.peak = max(self.peak, peak)


class _SavedBytes:
    """Counts the bytes that autograd saves, node by node; a storage counts once, in the first node that saves it."""

    def __init__(self, never: Sequence[torch.Tensor]) -> None:
        self.total = 0
        """Bytes that the present node is the first to save."""
        self.made = 0
        """Bytes among those in `total` that the present node made itself."""
        self._seen = {tensor.untyped_storage()._cdata for tensor in never}
        self._came_in: set[int] = set()
        self._held: list[torch.Tensor] = []
        """Saved tensors, kept alive so that no address is used again."""

    def begin(self, values: Sequence[torch.Tensor]) -> None:
        """Start counting for the next node, which is given these values."""
        self.total = self.made = 0
        self._came_in = {tensor.untyped_storage()._cdata for tensor in values}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._seen:
            self._seen.add(key)
            self._held.append(tensor.detach())
            self.total += storage.nbytes()
            self.made += 0 if key in self._came_in else storage.nbytes()
        return tensor


def _entering(leaf: Any) -> Any:
    """Return a tensor as it enters a node: cut off from the graph before it, and free to be changed in place."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    fresh = torch.empty(0, dtype=leaf.dtype, device=leaf.device).set_(
        leaf.untyped_storage(), leaf.storage_offset(), leaf.size(), leaf.stride()
    )
    return _Root.apply(torch.zeros((), requires_grad=True), [fresh]) if leaf.requires_grad else fresh  # type: ignore[no-untyped-call]


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, value: list[torch.Tensor]) -> torch.Tensor:
        return value.pop()

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> Any:
        return None, None


def _detached(leaf: Any) -> Any:
    """Return a tensor detached from the node's graph, but still marked as needing a gradient."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class _Crossing:
    """Values that cross a cut, and their storages; `plain` is True if all of them can be handed on."""

    storages: tuple[tuple[int, int], ...]
    """Pairs of a value and the address of a storage that it has."""
    values: frozenset[int]
    plain: bool

    @classmethod
    def of(cls, values: Mapping[int, Any]) -> _Crossing:
        storages = tuple((value, t.untyped_storage()._cdata) for value, tree in values.items() for t in _tensors(tree))
        return cls(storages, frozenset(values), all(map(_can_cross, tree_leaves(list(values.values())))))

    def shared(self, mutated: Container[int]) -> bool:
        """True if a value that is changed in place shares a storage with another."""
        first: dict[int, int] = {}
        return any(
            other != value and (other in mutated or value in mutated)
            for value, storage in self.storages
            for other in [first.setdefault(storage, value)]
        )


def _can_cross(leaf: Any) -> bool:
    plain = bool | int | float | str | torch.dtype | torch.device | torch.Tensor
    return leaf is None or isinstance(leaf, plain)
