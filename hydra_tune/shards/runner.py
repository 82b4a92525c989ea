"""Running one shard on one batch: forward, loss, backward, step, with everything it needs brought to the device.

The model here is a skeleton: its parameters and buffers are empty until a step attaches the blocks that hold them.
Each step says which blocks it needs, and when each is due next, so that memory knows what to keep.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from hydra_tune.engine.device_memory import DeviceMemory
from hydra_tune.engine.spill import SpillFiles
from hydra_tune.errors import CandidateError
from hydra_tune.graph.program import Program
from hydra_tune.seeds import RandomState
from hydra_tune.shards.plan import Bundle, Plan, Shard
from hydra_tune.shards.saved import Enter, SavedTensors
from hydra_tune.shards.values import Piece, Values, as_bytes, compact

TARGETS = -1
"""The batch's targets, among its values."""


@dataclass
class _Graph:
    """What a forward leaves for its backward: where gradients come in, and what autograd saved."""

    saved: SavedTensors
    edges: list[tuple[Piece, GradientEdge]] = field(default_factory=list)
    gradients: list[tuple[Piece, torch.Tensor]] = field(default_factory=list)
    """In the backward: the gradients of the values that came in."""


class Step:
    """The blocks in use by one step; all are released when it ends."""

    def __init__(self, runner: ShardRunner, position: int) -> None:
        self._runner = runner
        self._memory, self._files = runner.memory, runner.files
        self.position = position
        self.held: dict[str, torch.Tensor] = {}
        self._changed: set[str] = set()

    def hold(self, key: str) -> torch.Tensor:
        """A block's content, on the device until the step ends."""
        if key not in self.held:
            self.held[key] = self._memory.acquire(self._files, key, due=0.0)
        return self.held[key]

    def make(self, key: str, size: int) -> torch.Tensor:
        """A new block."""
        self.held[key] = self._memory.new(self._files, key, size)
        self._changed.add(key)
        return self.held[key]

    def change(self, key: str) -> None:
        """The step has changed this block."""
        self._changed.add(key)

    def drop(self, key: str) -> None:
        """A block that this step used is needed no longer."""
        del self.held[key]
        self._memory.release(self._files, key, due=0.0)
        self._memory.discard(self._files, key)

    def end(self) -> None:
        for key in self.held:
            version = self._runner.next_version() if key in self._changed else None
            self._memory.release(self._files, key, self._runner.due(key, self.position), changed_at=version)
        self.held.clear()


class ShardRunner:
    """Runs the shards of one trial in one worker."""

    def __init__(
        self, model: nn.Module, program: Program, plan: Plan, memory: DeviceMemory, files: SpillFiles,
        on_gradient: Callable[[str, nn.Parameter], None],
    ) -> None:  # fmt: skip
        self.model = model
        self.program = program
        self.plan = plan
        self.memory = memory
        self.files = files
        self.values = Values(memory, files)
        self.version = 0
        self.batch_base = 0
        """Steps in earlier batches: dues count on over batches."""
        self.scale = 1.0
        """How many times the batch that runs is the one that the shards were measured by, if it is larger."""
        self._graphs: dict[int, _Graph] = {}
        self._random: dict[int, RandomState] = {}
        self._parameters = dict(model.named_parameters())
        self._buffers = dict(model.named_buffers())
        self._anchor = torch.zeros((), requires_grad=True)
        self._uses = self._all_uses()
        self._places = {
            entry.name: (f"w/{bundle.name}", entry.offset, entry.offset + max(entry.size, 1))
            for bundle in plan.bundles
            for entry in bundle.weights.fields
        }
        self._in_backward: SavedTensors | None = None
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(_call, on_gradient, name))  # type: ignore[no-untyped-call]

    def next_version(self) -> int:
        self.version += 1
        return self.version

    # When blocks are due

    @property
    def steps_a_batch(self) -> int:
        return self.plan.steps_a_batch + (len(self.plan.shards) if self.plan.deferred else 0)

    def backward_position(self, shard: int) -> int:
        return 2 * len(self.plan.shards) - 2 - shard

    def step_position(self, shard: int) -> int:
        return self.plan.steps_a_batch + shard

    def _all_uses(self) -> dict[str, list[int]]:
        """The positions within a batch at which each block of state is used."""
        uses: dict[str, set[int]] = {}
        for bundle in self.plan.bundles:
            if not bundle.users:
                continue
            both = {position for shard in bundle.users for position in (shard, self.backward_position(shard))}
            step = {self.step_position(bundle.owner) if self.plan.deferred else self.backward_position(bundle.owner)}
            uses[f"w/{bundle.name}"] = both | step
            backward = {self.backward_position(shard) for shard in bundle.users} | step
            uses |= dict.fromkeys(bundle.optimizer, step)
            uses |= {key: backward if key.startswith("i/") else step for key in bundle.survivors}
            uses[f"g/{bundle.name}"] = backward
        for shard in self.plan.shards:
            uses[f"b/{shard.index}"] = {shard.index, self.backward_position(shard.index)}
        return {key: sorted(positions) for key, positions in uses.items()}

    def due(self, key: str, position: int) -> float:
        """When a block is used next, after `position` of the present batch."""
        if key.startswith("x/"):
            # A value goes back where it came from: it is needed until its maker's backward.
            return self.batch_base + self.steps_a_batch - 1
        uses = self._uses.get(key)
        if uses is None:
            return self.batch_base + self.backward_position(int(key.split("/")[1]))
        later = bisect.bisect_right(uses, position)
        return self.batch_base + (uses[later] if later < len(uses) else self.steps_a_batch + uses[0])

    def _bring_in_next(self, step: Step) -> None:
        """Let the transfer thread fetch what the step after this one needs, now that this one has all it needs."""
        self.memory.prefetch([(self.files, key, due) for key, due in self._needs(step.position + 1)])

    def _needs(self, position: int) -> list[tuple[str, float]]:
        """The blocks that the step at `position` of this batch, or the first of the next, needs."""
        base = self.batch_base
        if position >= self.steps_a_batch:
            base, position = base + self.steps_a_batch, 0
        wanted = [(key, float(base + position)) for key, uses in self._uses.items() if position in uses]
        shard = 2 * len(self.plan.shards) - 2 - position
        graph = self._graphs.get(shard)
        saved = graph.saved.keys if graph is not None else []
        return wanted + [(key, float(base + position)) for key in saved]

    # Attaching

    @contextmanager
    def step(self, shard: Shard, position: int, reserve: int) -> Iterator[Step]:
        """Everything that the shard's operations use is on the device and attached, until the end."""
        self.memory.reserve(reserve)
        step = Step(self, position)
        attached = [*(name for bundle in shard.bundles for name in bundle.parameters)]
        try:
            for bundle in shard.bundles:
                for name, view in bundle.weights.views(step.hold(f"w/{bundle.name}")).items():
                    self._parameters[name].data = view
            if shard.buffers.size:
                for name, view in shard.buffers.views(step.hold(f"b/{shard.index}")).items():
                    self._buffers[name].data = view
            yield step
        finally:
            for name in attached:
                parameter = self._parameters[name]
                parameter.data, parameter.grad = parameter.data.new_empty(0), None
            for entry in shard.buffers.fields:
                self._buffers[entry.name].data = self._buffers[entry.name].data.new_empty(0)
            step.end()
            self.memory.reserve(0)

    def attach_gradients(self, step: Step, bundle: Bundle) -> dict[str, torch.Tensor]:
        """Let the gradients of a bundle gather in its block, which is made, all zero, where there is none.

        Those of pruned parameters, which autograd cannot write to, are returned.
        """
        key = f"g/{bundle.name}"
        if self.memory.holds(self.files, key) or self.files.find(key) is not None:
            block = step.hold(key)
        else:
            block = step.make(key, bundle.gradients.size).zero_()
        step.change(key)
        views, pruned = bundle.gradients.views(block), bundle.pruned
        for name in views.keys() - pruned:
            self._parameters[name].grad = views[name]
        return {name: views[name] for name in pruned}

    def forward_reserve(self, shard: Shard) -> int:
        """What a forward takes for a moment."""
        return int(self.scale * shard.cost.forward_working_bytes)

    def backward_reserve(self, shard: Shard) -> int:
        """What a backward allocates besides blocks; gradients too, where each is used up as soon as it is there."""
        transient = int(self.scale * max(shard.cost.forward_working_bytes, shard.cost.backward_working_bytes))
        return transient + (0 if self.plan.deferred else self.largest_parameter(shard))

    def step_reserve(self, shard: Shard) -> int:
        """What a step that is made apart allocates besides blocks."""
        survivors = [
            entry.size for bundle in shard.bundles for entry in bundle.gradients.fields if entry.name in bundle.pruned
        ]
        return max(2 * self.largest_parameter(shard), 4 * max(survivors, default=0))

    def largest_parameter(self, shard: Shard) -> int:
        return max((entry.size for bundle in shard.bundles for entry in bundle.weights.fields), default=0)

    # Running

    def forward(self, shard: Shard, keep_graph: bool) -> None:
        """The shard's forward in training; its values for later shards are kept, and its graph if asked for."""
        with self.step(shard, shard.index, self.forward_reserve(shard)) as step:
            before = self._buffer_versions(shard)
            earlier: torch.Tensor | None = None
            if not keep_graph:
                self._random[shard.index] = RandomState.capture(self.memory.device)
                earlier = step.hold(f"b/{shard.index}").clone() if shard.buffers.size else None
            self._bring_in_next(step)
            values, graph = self._run(shard, step, graph=keep_graph)
            for value in shard.gives:
                saved = None if graph is None else graph.saved.key_of
                self.values.put(value, values[value], self.due("x/", step.position), saved)
            if graph is not None:
                self._graphs[shard.index] = graph
                self._remember_edges(shard, graph, values)
            if self._note_buffers(shard, step, before) and earlier is not None:
                key = _earlier_buffers(shard)
                self.memory.adopt(self.files, key, earlier, self.due(key, step.position))
            del values

    def _remember_edges(self, shard: Shard, graph: _Graph, values: Mapping[int, Any]) -> None:
        for value in shard.gives:
            tensors = [leaf for leaf in tree_leaves(values[value]) if isinstance(leaf, torch.Tensor)]
            for piece, tensor in zip(self.values[value].pieces, tensors, strict=True):
                if piece.grad:
                    graph.edges.append((piece, get_gradient_edge(tensor)))
        graph.saved.forward_done()

    def forward_loss(
        self, shard: Shard, loss: Callable[[Any, Any], torch.Tensor], prepare: Callable[[Step], None],
        finish: Callable[[Step], None],
    ) -> None:  # fmt: skip
        """The last shard: forward, loss and backward in one step."""
        with self.step(shard, shard.index, self.backward_reserve(shard)) as step:
            before = self._buffer_versions(shard)
            values, graph = self._run(shard, step, graph=True)
            assert graph is not None
            self._note_buffers(shard, step, before)
            targets = self._entered(step, TARGETS, None)
            with saved_tensors_hooks(graph.saved.pack, graph.saved.unpack):
                total = loss(self.program.outputs(values), targets)
            del values
            graph.saved.forward_done()
            prepare(step)
            self._bring_in_next(step)
            with self._backward_of(graph, step):
                total.backward()  # type: ignore[no-untyped-call]
            del total
            self._pass_back(step, graph)
            finish(step)
        graph.saved.discard()

    def backward(self, shard: Shard, prepare: Callable[[Step], None], finish: Callable[[Step], None]) -> None:
        """The shard's backward, after its forward again where that was not kept."""
        position = self.backward_position(shard.index)
        with self.step(shard, position, self.backward_reserve(shard)) as step:
            graph = self._graphs.pop(shard.index, None) or self._again(shard, step)
            arrived = [(piece, edge) for piece, edge in graph.edges if self._has(piece.gradient)]
            gradients = [piece.view(step.hold(piece.gradient)) for piece, _ in arrived]
            prepare(step)
            for key in graph.saved.keys:
                step.hold(key)
            self._bring_in_next(step)
            if arrived:
                with self._backward_of(graph, step):
                    torch.autograd.backward([edge for _, edge in arrived], gradients)
            self._pass_back(step, graph)
            finish(step)
            del gradients
        for piece, _ in arrived:
            self.memory.discard(self.files, piece.gradient)
        for value in shard.gives:
            self.values.drop(value)
        graph.saved.discard()
        self.memory.discard(self.files, _earlier_buffers(shard))

    @contextmanager
    def _backward_of(self, graph: _Graph, step: Step) -> Iterator[None]:
        graph.saved.hold, self._in_backward = step.hold, graph.saved
        try:
            yield
        finally:
            self._in_backward = None

    def still_needed(self, name: str) -> bool:
        """Whether the backward that runs will look at a parameter again, though its gradient is done.

        So it is where the model uses a weight in two places, one of them without a gradient: `weight.detach()`.
        """
        return self._in_backward is not None and self._in_backward.wants(*self._places[name])

    def _has(self, key: str) -> bool:
        return self.memory.holds(self.files, key) or self.files.find(key) is not None

    def _again(self, shard: Shard, step: Step) -> _Graph:
        """The forward once more, with the random numbers and buffers of the first time; buffers stay as they are."""
        here = RandomState.capture(self.memory.device)
        buffers = step.hold(f"b/{shard.index}").clone() if shard.buffers.size else None
        if self._has(_earlier_buffers(shard)):
            step.hold(f"b/{shard.index}").copy_(step.hold(_earlier_buffers(shard)))
        self._random.pop(shard.index).restore(self.memory.device)
        values, graph = self._run(shard, step, graph=True)
        assert graph is not None
        self._remember_edges(shard, graph, values)
        if buffers is not None:
            self._rebound(shard)
            step.hold(f"b/{shard.index}").copy_(buffers)
        here.restore(self.memory.device)
        return graph

    def _run(self, shard: Shard, step: Step, *, graph: bool) -> tuple[dict[int, Any], _Graph | None]:
        due = self.batch_base + self.backward_position(shard.index)
        made = _Graph(SavedTensors(self.memory, self.files, shard.index, due))
        values = {value: self._entered(step, value, made) for value in shard.takes}
        made.saved.refer_to(step.held)
        # Without a graph to keep, autograd runs all the same, and saves nothing: which values have gradients must show.
        pack = made.saved.pack if graph else _nothing
        with saved_tensors_hooks(pack, made.saved.unpack), self._noting_weights(shard, step):
            self.program.run(self.model, values, shard.start, shard.stop, training=True)
        return values, made if graph else None

    def _entered(self, step: Step, value: int, graph: _Graph | None) -> Any:
        """A value as the shard sees it: with a gradient to pass back, where it has one."""
        tensors = {}
        for piece in self.values[value].pieces:
            tensor = piece.view(step.hold(piece.key))
            if value in self.program.mutated:
                tensor = tensor.clone()
            if piece.grad and graph is not None:
                tensor = Enter.apply(self._anchor, [tensor], _Aside(graph.gradients, piece))  # type: ignore[no-untyped-call]
            tensors[piece.name] = tensor
        return self.values.tree(value, tensors)

    def _pass_back(self, step: Step, graph: _Graph) -> None:
        """Add the gradients of the values that came in to what later shards have passed back.

        The backward is over: what was reserved for it is free for them.
        """
        self.memory.reserve(0)
        for piece, gradient in graph.gradients:
            if self._has(piece.gradient):
                piece.view(step.hold(piece.gradient)).add_(gradient)
                step.change(piece.gradient)
                continue
            laid_out = compact(gradient)
            if laid_out.stride() != piece.stride:
                laid_out = torch.empty_strided(
                    piece.shape, piece.stride, dtype=piece.dtype, device=gradient.device
                ).copy_(gradient)  # fmt: skip
            self.memory.adopt(self.files, piece.gradient, as_bytes(laid_out), self.batch_base + step.position + 1)
        graph.gradients.clear()

    def evaluate(self, shard: Shard, judge: Callable[[Any, Any], None]) -> None:
        """The shard's forward in evaluation mode; the last one's outputs and the targets go to `judge`."""
        with self.step(shard, shard.index, self.forward_reserve(shard)) as step, torch.no_grad():
            values = {value: self._entered(step, value, None) for value in shard.takes}
            before = self._buffer_versions(shard)
            if shard.index + 1 < len(self.plan.shards):
                self._bring_in_next(step)
            with self._noting_weights(shard, step):
                self.program.run(self.model, values, shard.start, shard.stop, training=False)
            self._note_buffers(shard, step, before)
            for value in shard.gives:
                self.values.put(value, values[value], self.due("x/", step.position))
            if shard.index == len(self.plan.shards) - 1:
                judge(self.program.outputs(values), self._entered(step, TARGETS, None))

    def end_batch(self) -> None:
        """Drop what is left of the batch."""
        self.values.drop_all()
        for graph in self._graphs.values():
            graph.saved.discard()
        self._graphs.clear()
        self._random.clear()
        self.batch_base += self.steps_a_batch

    # What a forward changes

    @contextmanager
    def _noting_weights(self, shard: Shard, step: Step) -> Iterator[None]:
        """Note which weights a forward changes in place, as `nn.Embedding(max_norm=...)` does."""
        before = {name: self._parameters[name]._version for bundle in shard.bundles for name in bundle.parameters}
        yield
        for bundle in shard.bundles:
            if any(self._parameters[name]._version != before[name] for name in bundle.parameters):
                step.change(f"w/{bundle.name}")

    def _buffer_versions(self, shard: Shard) -> list[int]:
        return [self._buffers[entry.name]._version for entry in shard.buffers.fields]

    def _note_buffers(self, shard: Shard, step: Step, before: list[int]) -> bool:
        """Note whether the forward has changed buffers, in place or by assigning others."""
        rebound = self._rebound(shard)
        with torch.no_grad():
            for name, assigned in rebound.items():
                if assigned.shape != self._buffers[name].shape:
                    raise CandidateError(
                        f"buffer {name!r} changes its shape to {tuple(assigned.shape)} in training",
                        "give it its final shape, or use --strategy whole",
                    )
                self._buffers[name].copy_(assigned)
        changed = bool(rebound) or self._buffer_versions(shard) != before
        if changed:
            step.change(f"b/{shard.index}")
        return changed

    def _rebound(self, shard: Shard) -> dict[str, torch.Tensor]:
        """Buffers for which a module has assigned other tensors; the module gets the one in the block back."""
        found: dict[str, torch.Tensor] = {}
        for entry in shard.buffers.fields:
            path, _, name = entry.name.rpartition(".")
            own = self.model.get_submodule(path)._buffers
            if own[name] is not self._buffers[entry.name]:
                assigned, own[name] = own[name], self._buffers[entry.name]
                assert assigned is not None
                found[entry.name] = assigned
        return found


def _earlier_buffers(shard: Shard) -> str:
    """The block with a shard's buffers from before its forward, where that changed them and will run again."""
    return f"a/{shard.index}/buffers"


def _nothing(_tensor: torch.Tensor) -> None:
    """What is saved of a tensor where the forward will run again."""


def _call(on_gradient: Callable[[str, nn.Parameter], None], name: str, parameter: nn.Parameter) -> None:
    on_gradient(name, parameter)


@dataclass(frozen=True)
class _Aside:
    """Puts the gradient of a value's piece aside."""

    gradients: list[tuple[Piece, torch.Tensor]]
    piece: Piece

    def __call__(self, gradient: torch.Tensor) -> None:
        self.gradients.append((self.piece, gradient))
