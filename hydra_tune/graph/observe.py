"""Observing a model: its own forward and backward run as they are on one batch, and hooks note what happens when.

The forward is divided into *nodes*: a node begins when a module that has parameters of its own is called, and lasts
until the next such call. For each node the observation has the parameters that operations used in it, wherever user
code took them from, the bytes that autograd saved, the most bytes that were alive for a moment, and the seconds of its
forward and backward. Nothing is traced: any Python may run between the modules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from hydra_tune.core.alignment import aligned
from hydra_tune.core.clock import work_seconds
from hydra_tune.core.random_state import RandomState
from hydra_tune.core.tensor_memory import has_memory
from hydra_tune.graph.capture import untouched
from hydra_tune.graph.costs import NodeCost
from hydra_tune.graph.own_tensors import OwnTensors, UseCounter
from hydra_tune.graph.pilot_run import ModuleCall, PilotRun, SavedCopies, SavedTensor
from hydra_tune.graph.pilot_steps import PilotOptimizer, PilotSteps, StateLayout, bytes_of, gradients_aside, state_bytes

MOST_NODES = 1000
"""Most nodes of a model. Where a forward calls more modules, as a recurrent cell does, consecutive calls become one
node."""
TIMED_RUNS, TIMED_SECONDS = 2, 0.5
"""Most timed runs without counting, and seconds: no run starts after them, and a slower batch is timed while it is
counted."""


@dataclass(frozen=True)
class ObservedNode:
    """A part of the forward that begins with a call of one module."""

    name: str
    """Name of the module whose call begins the node; empty for the part before the first such call."""
    parameters: tuple[str, ...]
    """Names of the parameters that operations use in it; a tied one goes by the first of its names."""
    calls: tuple[str, ...]
    """Names of the modules that are called in it, in order; the first begins the node."""


@dataclass(frozen=True)
class Observed:
    """Nodes of an observed model, in the order of their first call."""

    nodes: tuple[ObservedNode, ...]
    mixed: bool = False
    """True if operations compute in bfloat16 under autocast, with some weights stored in 16 bits."""
    rewritten: tuple[str, ...] = ()
    """Parameters that the forward itself changes, as masked layers do."""
    late: bool = False
    """True if steps must wait for the end of the backward: a gradient may come in parts, or be followed by another look
    at its parameter (modules that run in the backward, backward hooks of modules)."""


@dataclass(frozen=True)
class Observation:
    """Measured costs of a model's nodes for one batch."""

    observed: Observed
    nodes: tuple[NodeCost, ...]
    state: StateLayout
    """Dtype and shape of each tensor of optimizer state, by parameter."""
    input_bytes: int
    changes_buffers: bool = False
    """True if the forward in training changes buffers, as batch-norm does."""
    draws: bool = False
    """True if the forward in training draws random numbers."""


def node_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose calls begin nodes: those that have parameters of their own and run in Python."""
    for module in model.modules():
        if not isinstance(module, torch.jit.ScriptModule) and any(p is not None for p in module._parameters.values()):
            yield module


def module_names(model: nn.Module) -> dict[int, str]:
    """Return the first name of each module, by the module's id."""
    return {id(module): name for name, module in reversed(list(model.named_modules(remove_duplicate=False)))}


def observe(
    model: nn.Module, forward: Callable[[Any], Any], loss: Callable[[Any, Any], torch.Tensor],
    optimizer: PilotOptimizer, batch: tuple[Any, Any], preferred: Sequence[str] = (), *, mixed: bool = False,
) -> Observation:  # fmt: skip
    """Run one batch, `loss(forward(inputs), targets)` and its backward, and return the costs.

    The model is left as it was. `batch` has the inputs and the targets; each run has a copy of them, which counts as
    memory for as long as anything refers to it.
    """
    pilot = _Pilot(model, forward, loss, optimizer, batch)
    with gradients_aside(model), pilot.weights_restored():
        began = time.perf_counter()
        with untouched(model):
            model.train()
            counted = pilot.run(counting=True)
        took = time.perf_counter() - began
        timed = counted if took > TIMED_SECONDS else _timed(pilot, counted)
        pilot.steps.prepare_others()
    groups = _together(len(counted.spans))
    nodes, costs = pilot.described(counted, timed, groups, preferred)
    late = pilot.looks_again or pilot.steps.repeated
    return Observation(
        Observed(nodes, mixed, tuple(pilot.rewritten), late), costs, pilot.steps.state, bytes_of(batch),
        counted.changes_buffers, counted.draws,
    )  # fmt: skip


def _timed(pilot: _Pilot, counted: PilotRun) -> PilotRun:
    """Return the quickest timed run that called the same modules as `counted`; `counted` itself if none did."""
    runs: list[PilotRun] = []
    began = time.perf_counter()
    while len(runs) < TIMED_RUNS and (not runs or time.perf_counter() - began < TIMED_SECONDS):
        with untouched(pilot.model):
            pilot.model.train()
            runs.append(pilot.run(counting=False))
    alike = [run for run in runs if [s.name for s in run.spans] == [s.name for s in counted.spans]]
    return min(alike, key=lambda run: sum(s.forward_seconds + s.backward_seconds for s in run.spans), default=counted)


def _together(count: int) -> list[range]:
    """Return ranges of consecutive spans, one range for each node."""
    size = -(-count // MOST_NODES)
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def _copied(leaf: Any) -> Any:
    """Return a copy of a tensor of the batch, and anything else as it is."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


class _Pilot:
    """Runs one batch through a model, and measures its nodes."""

    def __init__(
        self, model: nn.Module, forward: Callable[[Any], Any], loss: Callable[[Any, Any], torch.Tensor],
        optimizer: PilotOptimizer, batch: tuple[Any, Any],
    ) -> None:  # fmt: skip
        self.model = model
        self.forward = forward
        self.loss = loss
        self.batch = batch
        self.parameters = dict(model.named_parameters())
        named = [*self.parameters.items(), *model.named_buffers()]
        self.own = OwnTensors(named)
        self.steps = PilotSteps(model, optimizer)
        self._names = module_names(model)
        self._own_names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._before: dict[str, torch.Tensor] = {}
        """Copies of parameters that the forward changes in place, as `nn.Embedding(max_norm=...)` does, to restore
        them."""
        self.rewritten: dict[str, None] = {}
        """Parameters that the forward changes."""
        self.looks_again = any(m._backward_hooks or m._backward_pre_hooks for m in model.modules())
        """True if the backward may look at parameters whose gradients are complete: it runs modules or their hooks."""
        self._run = PilotRun([])
        self._at = 0
        self._clock = 0.0
        self._in_backward = False
        self._counting = False
        self._saved = SavedCopies()

    @contextmanager
    def weights_restored(self) -> Iterator[None]:
        there = {name: parameter.data for name, parameter in self.parameters.items()}
        try:
            yield
        finally:
            with torch.no_grad():
                for name, tensor in there.items():
                    if self.parameters[name].data_ptr() != tensor.data_ptr():
                        # User code has put another tensor in its place: `parameter.data = ...`.
                        self.parameters[name].data = tensor
                        self.rewritten[name] = None
                for name, tensor in self._before.items():
                    self.parameters[name].copy_(tensor)

    # What happens

    def used(self, name: str, changed: bool) -> None:
        """Note that an operation in the present node uses a parameter or buffer; `changed` if it writes to it."""
        if self._in_backward or name not in self.parameters:
            return
        self._run.spans[self._at].parameters[name] = None
        if changed:
            self.rewritten[name] = None
        if changed and name not in self._before:
            with _disable_current_modes():
                self._before[name] = self.parameters[name].detach().clone()

    def note_peak(self, live: int) -> None:
        span = self._run.spans[self._at]
        if self._in_backward and not self.steps.stepping:
            span.stepless_peak = max(span.stepless_peak, live)
        if self._in_backward:
            span.backward_peak = max(span.backward_peak, live)
            span.backward_held = max(span.backward_held, live + self._saved.held)
        else:
            span.forward_live = max(span.forward_live, live)
            span.forward_peak = max(span.forward_peak, live - self._saved.live_here)
            span.unsaved = max(span.unsaved, live - self._saved.live)

    def _begin_node(self, module: nn.Module, _arguments: Any) -> None:
        name = self._names.get(id(module))
        if name is None:
            return  # a copy that the forward has made
        if self._in_backward:
            self.looks_again = True  # the model computes some of its forward again
            return
        self._switch(len(self._run.spans))
        self._run.spans.append(ModuleCall(name))
        for parameter in module._parameters.values():
            if id(parameter) in self._own_names:  # in training the call attaches it, even if no operation uses it
                self._run.spans[-1].parameters[self._own_names[id(parameter)]] = None

    def _switch(self, to: int) -> None:
        """Add the time so far to the present node, and measure the node `to` from here on."""
        now, span = work_seconds(), self._run.spans[self._at]
        if self._in_backward:
            span.backward_seconds += now - self._clock
        else:
            span.forward_seconds += now - self._clock
            self._saved.live_here = 0
        self._at, self._clock = to, now
        self._saved.at = to

    def _pack(self, tensor: torch.Tensor) -> SavedTensor:
        """Save a copy for autograd, so that the tensor itself lives only as long as something else refers to it."""
        if not has_memory(tensor) or self.own.holds(tensor):
            return SavedTensor(self._at, tensor)
        saved, size = self._saved.save(tensor, self._at)
        self._run.spans[self._at].saved += size
        return saved

    def _unpack(self, saved: SavedTensor) -> torch.Tensor:
        if self._in_backward and saved.span != self._at:
            self._switch(saved.span)
        if self._counting and has_memory(saved.tensor) and not self.own.holds(saved.tensor):
            self._saved.hold(saved)
        return saved.tensor

    # A run

    def run(self, *, counting: bool) -> PilotRun:
        """Run the batch forward and backward; bytes are counted only if `counting`."""
        self._run, self._at, self._in_backward, self._counting = PilotRun([ModuleCall("")]), 0, False, counting
        self._saved = SavedCopies()
        buffers = {name: (buffer, buffer._version) for name, buffer in self.model.named_buffers()}
        streams = RandomState.capture()
        inputs, targets = tree_map(_copied, self.batch)
        there = [leaf for leaf in tree_leaves((inputs, targets)) if isinstance(leaf, torch.Tensor)]
        watch = UseCounter(self.own, there, self.used, self.note_peak) if counting else None
        del there
        hooks = [
            module.register_forward_pre_hook(self._begin_node, prepend=True) for module in node_modules(self.model)
        ]  # fmt: skip
        self._clock = work_seconds()
        try:
            with watch or nullcontext(), saved_tensors_hooks(self._packing(counting), self._unpack):
                total = self.loss(self.forward(inputs), targets)
            del inputs, targets  # as in training
            self.steps.take_early()
            self._run.draws = not streams.same_as(RandomState.capture())
            self._switch(self._at)
            self._backward(total, watch)
        finally:
            for hook in hooks:
                hook.remove()
        after = dict(self.model.named_buffers())
        self._run.changes_buffers = any(
            name not in after or after[name] is not buffer or after[name]._version != version
            for name, (buffer, version) in buffers.items()
        )
        return self._run

    def _packing(self, counting: bool) -> Callable[[torch.Tensor], Any]:
        return self._pack if counting else lambda tensor: SavedTensor(self._at, tensor.detach())

    def _backward(self, total: torch.Tensor, watch: UseCounter | None) -> None:
        self._in_backward = True
        if not total.requires_grad:
            return
        with self.steps.made(watch, self._stepped), watch or nullcontext():
            total.backward()  # type: ignore[no-untyped-call]
        self._switch(self._at)

    def _stepped(self, seconds: float, apart: float, peak: int) -> None:
        """Add a parameter's optimizer step to the present node; its preparation, `apart`, is left out of the clock."""
        span = self._run.spans[self._at]
        span.step_seconds += seconds
        span.backward_peak = max(span.backward_peak, peak)
        span.backward_held = max(span.backward_held, peak + self._saved.held)
        self._clock += seconds + apart

    # What came of it

    def described(
        self, counted: PilotRun, timed: PilotRun, groups: Sequence[range], preferred: Sequence[str]
    ) -> tuple[tuple[ObservedNode, ...], tuple[NodeCost, ...]]:
        """Return the nodes and their costs, with bytes from the counted run and seconds from the timed one."""
        sizes = {name: aligned(p.numel() * p.element_size()) for name, p in self.parameters.items()}
        buffers = sum(aligned(b.numel() * b.element_size()) for b in self.model.buffers())
        used = [list(dict.fromkeys(n for i in group for n in counted.spans[i].parameters)) for group in groups]
        first: dict[str, int] = {}
        for index, names in enumerate(used):
            for name in names:
                first.setdefault(name, index)
        tied = {name for index, names in enumerate(used) for name in names if first[name] != index}
        nodes, costs = [], []
        for index, group in enumerate(groups):
            spans, clocks = [counted.spans[i] for i in group], [timed.spans[i] for i in group]
            nodes.append(ObservedNode(spans[0].name, tuple(used[index]), tuple(s.name for s in spans)))
            costs.append(
                self._cost(spans, clocks, used[index], [n for n in used[index] if first[n] == index], tied, sizes,
                           buffers, preferred)
            )  # fmt: skip
        return tuple(nodes), tuple(costs)

    def _cost(
        self, spans: Sequence[ModuleCall], clocks: Sequence[ModuleCall], used: Sequence[str], own: Sequence[str],
        tied: set[str], sizes: Mapping[str, int], buffers: int, preferred: Sequence[str],
    ) -> NodeCost:  # fmt: skip
        largest = max((sizes[name] for name in used), default=0)
        name = spans[0].name
        return NodeCost(
            name=name or "the beginning", forward_seconds=sum(s.forward_seconds for s in clocks),
            backward_seconds=sum(s.backward_seconds for s in clocks), step_seconds=sum(s.step_seconds for s in clocks),
            parameter_bytes=sum(sizes[n] for n in own),
            optimizer_bytes=sum(state_bytes(self.steps.state.get(n, {})) for n in own),
            buffer_bytes=0, largest_parameter_bytes=largest, activation_bytes=sum(s.saved for s in spans),
            # Buffers stay on the device for the whole of a batch.
            forward_peak_bytes=buffers + max(s.forward_peak for s in spans),
            backward_peak_bytes=buffers + max(0, max(s.backward_peak for s in spans) - largest),
            stepless_peak_bytes=buffers + max(0, max(s.stepless_peak for s in spans) - largest),
            boundary_bytes=0,
            unsaved_bytes=buffers + max(s.unsaved for s in spans),
            forward_live_bytes=buffers + max(s.forward_live for s in spans),
            backward_held_bytes=buffers + max(0, max(s.backward_held for s in spans) - largest),
            preferred=any(name == point or name.startswith(point + ".") for point in preferred),
            tied={n: sizes[n] for n in used if n not in own}, shared={n: sizes[n] for n in own if n in tied},
        )  # fmt: skip
