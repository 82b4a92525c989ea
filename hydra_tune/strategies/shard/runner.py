"""Runs the user's model with one shard on the device at a time.

The model's own forward and backward run as they are. When a module is called that belongs to another shard, the blocks
of the present shard are let go of and those of the next are attached to its parameters; in the backward, the first
saved tensor of another shard that autograd asks for says the same. A parameter that is used out of turn is brought in
when it is asked for. Each change of shard says when blocks are due next, so that memory knows what to keep, and lets
the transfer thread bring in what comes after.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from hydra_tune.graph.observe import module_names, node_modules
from hydra_tune.spill.device_memory import DeviceMemory, OutOfDeviceMemory
from hydra_tune.spill.store import SpillFiles
from hydra_tune.strategies.shard.held_blocks import HeldBlocks
from hydra_tune.strategies.shard.path import Path
from hydra_tune.strategies.shard.plan import Bundle, Plan, PlannedShard
from hydra_tune.strategies.shard.saved import Handle, SavedTensors
from hydra_tune.strategies.shard.skeleton import placeholder, watch
from hydra_tune.strategies.shard.values import strided


class ShardRunner:
    """Runs one trial's model in one worker, shard by shard."""

    def __init__(
        self, model: nn.Module, plan: Plan, memory: DeviceMemory, files: SpillFiles,
        on_gradient: Callable[[str, nn.Parameter], None], on_shard: Callable[[str, int], None],
        on_way: Callable[[set[str]], None],
    ) -> None:  # fmt: skip
        """Set the callbacks.

        `on_gradient` is called for each finished gradient; `on_shard` for each shard that has done its part of a batch,
        with the kind of part: forward, backward, evaluate or step; `on_way` when only the given parameters' blocks are
        still held.
        """
        self.model = model
        self.plan = plan
        self.memory = memory
        self.files = files
        self.version = 0
        self.batch_base = 0
        """Number of steps in earlier batches, added to every due step."""
        self.scale = 1.0
        """Size of the present batch divided by that of the measured one; at least 1."""
        self.saved = SavedTensors(memory, files)
        self.shard: PlannedShard | None = None
        """The shard that is on the device now."""
        self._kind = "forward"
        self._held = HeldBlocks(self, 0)
        self._on_shard = on_shard
        self._on_way = on_way
        self._in_use: Bundle | None = None
        """Bundle of the parameter that was asked for last."""
        self._path = Path(plan.nodes, plan.shard_of_node)
        self._parameters = dict(model.named_parameters())
        self._bundle_of = {name: bundle for bundle in plan.bundles for name in bundle.parameters}
        self._names = {id(parameter): name for name, parameter in self._parameters.items()}
        self._empty = {name: placeholder(parameter) for name, parameter in self._parameters.items()}
        self._attached: dict[str, tuple[int, int]] = {}
        """Autograd's version of each attached parameter at the time when it was attached."""
        self._places = {
            entry.name: (f"w/{bundle.name}", entry.offset, entry.offset + max(entry.size, 1))
            for bundle in plan.bundles
            for entry in bundle.weights.fields
        }
        self._uses = self._all_uses()
        self._running = False
        self._install(on_gradient)

    def _install(self, on_gradient: Callable[[str, nn.Parameter], None]) -> None:
        names = module_names(self.model)
        for module in node_modules(self.model):
            # First of all hooks: another may look at the module's parameters.
            module.register_forward_pre_hook(partial(self._on_call, names[id(module)]), prepend=True)
        watch(self.model, self._on_access)
        weak = WeakMethod(on_gradient)  # a parameter keeps its hooks where the garbage collector cannot look
        for name, parameter in self._parameters.items():
            if not (parameter.dtype.is_floating_point or parameter.dtype.is_complex):
                continue
            with _requiring_gradients(parameter):
                parameter.register_post_accumulate_grad_hook(partial(_call, weak, name))  # type: ignore[no-untyped-call]

    def __deepcopy__(self, _memo: Any) -> ShardRunner:
        return self  # a copy of a module that user code makes has this one's hooks

    def next_version(self) -> int:
        self.version += 1
        return self.version

    # When blocks are due

    @property
    def steps_a_batch(self) -> int:
        return (3 if self.plan.deferred else 2) * len(self.plan.shards)

    def position(self, kind: str, shard: int) -> int:
        """Return the place of a shard's forward, backward or step among the steps of a batch."""
        count = len(self.plan.shards)
        return {"forward": shard, "evaluate": shard, "backward": 2 * count - 1 - shard, "step": 2 * count + shard}[kind]

    def _all_uses(self) -> dict[str, list[int]]:
        """Return the positions within a batch at which each block of state is used."""
        uses: dict[str, set[int]] = {}
        for bundle in self.plan.bundles:
            if not bundle.users:
                continue
            backward = {self.position("backward", shard) for shard in bundle.users}
            step = {self.position("step" if self.plan.deferred else "backward", bundle.owner)}
            uses[f"w/{bundle.name}"] = {*bundle.users} | backward | step
            uses |= dict.fromkeys(bundle.optimizer, step)
            uses |= {key: backward | step if key.startswith("i/") else step for key in bundle.survivors}
            uses[f"g/{bundle.name}"] = backward | step
        return {key: sorted(positions) for key, positions in uses.items()}

    def due(self, key: str, position: int) -> float:
        """Return the number of the step that uses a block next, after `position` of the present batch."""
        if key.startswith("a/"):
            return self.batch_base + self.position("backward", int(key.split("/")[1]))
        uses = self._uses.get(key)
        if uses is None:  # of a parameter that only some batches use
            return self.batch_base + 2 * self.steps_a_batch
        later = bisect.bisect_right(uses, position)
        return self.batch_base + (uses[later] if later < len(uses) else self.steps_a_batch + uses[0])

    def _bring_in_next(self) -> None:
        """Let the transfer thread fetch the blocks of the next shard, now that this one has all it needs."""
        position, base = self._held.position + 1, self.batch_base
        if self._kind == "evaluate" and position >= len(self.plan.shards):
            return
        if position >= self.steps_a_batch:
            base, position = base + self.steps_a_batch, 0
        wanted = [key for key, uses in self._uses.items() if position in uses]
        if self._kind == "backward" and self.shard is not None:
            wanted += self.saved.of_shard.get(self.shard.index - 1, ())
        self.memory.prefetch([(self.files, key, float(base + position)) for key in wanted])

    # Which shard is on the device

    def enter(self, kind: str, index: int) -> HeldBlocks:
        """Bring a shard's parameters to the device and attach them, in place of those of the present shard."""
        if self.shard is not None and (kind, index) == (self._kind, self.shard.index):
            return self._held
        self.leave()
        shard = self.plan.shards[index]
        self._kind, self.shard, self._in_use = kind, shard, None
        self._held = HeldBlocks(self, self.position(kind, index))
        self.memory.reserve(self._reserve(kind, shard))
        for bundle in shard.bundles:
            self._attach(bundle)
        self._bring_in_next()
        return self._held

    def leave(self) -> None:
        """Release the shard that is on the device."""
        if self.shard is None:
            return
        self._sweep()
        self._detach(list(self._attached))
        self._held.end()
        self.memory.reserve(0)
        kind, index, self.shard = self._kind, self.shard.index, None
        self._on_shard(kind, index)

    def make_way(self) -> bool:
        """Release all blocks but those of the parameters in use at this moment; return False if there are no others.

        A parameter that is used out of turn needs room that its shard was not cut for.
        """
        own = self._in_use.parameters if self._in_use is not None else ()
        keys = [key for key in self._held.held if self._in_use is None or self._in_use.name not in key.split("/")]
        self._detach([name for name in self._attached if name not in own])
        self._held.release(keys)
        self._on_way(set(own))
        return bool(keys)

    def _detach(self, names: Iterable[str]) -> None:
        """Make parameters empty, and note which of them the forward changed in place, as `max_norm` does."""
        for name in names:
            parameter, (version, address) = self._parameters[name], self._attached.pop(name)
            bundle = self._bundle_of[name]
            key = f"w/{bundle.name}"
            if parameter.numel() and parameter.data_ptr() != address:
                # User code has put another tensor in its place: `parameter.data = ...`.
                bundle.weights.views(self._held.hold(key))[name].copy_(parameter.data)
                self._held.change(key)
            elif parameter._version != version or (name in self.plan.rewritten and self._kind != "step"):
                self._held.change(key)
            parameter.data = self._empty[name]

    def abandon(self) -> None:
        """Leave the model as a skeleton after a step that failed."""
        self._running = False
        for name in self._attached:
            self._parameters[name].data = self._empty[name]
        self._attached.clear()
        self.shard = None

    def _attach(self, bundle: Bundle) -> None:
        if all(name in self._attached for name in bundle.parameters):
            return
        if not bundle.weights.size:
            self._attached |= {name: (self._parameters[name]._version, 0) for name in bundle.parameters}
            return
        block = self._held.hold(f"w/{bundle.name}")
        self.saved.refer_to(f"w/{bundle.name}", block)
        for name, view in bundle.weights.views(block).items():
            self._parameters[name].data = view
            self._attached[name] = (self._parameters[name]._version, view.data_ptr())

    def attach(self, name: str) -> None:
        """Attach a parameter, with those that are moved together with it."""
        self._in_use = self._bundle_of[name]
        if name not in self._attached:
            self._attach(self._in_use)

    def _reserve(self, kind: str, shard: PlannedShard) -> int:
        """Return the bytes that a shard's part of a batch takes besides blocks."""
        cost = shard.cost
        if kind == "step":
            survivors = [e.size for b in shard.bundles for e in b.gradients.fields if e.name in b.pruned]
            return max(2 * self._largest(shard), 4 * max(survivors, default=0))
        if kind == "backward":
            largest = 0 if self.plan.deferred else self._largest(shard)
            return int(self.scale * cost.backward_working_bytes) + largest
        return int(self.scale * cost.unsaved_bytes)

    def reserve_less(self, size: int) -> bool:
        """Reserve only what the shard can still take beside the activations in use and `size` bytes more.

        A shard takes the most for itself at one moment, and holds the most activations at another. Returns False if
        that is known to be no less.
        """
        if self.shard is None or not self.shard.cost.forward_live_bytes or self._kind == "step":
            return False
        cost, backward = self.shard.cost, self._kind == "backward"
        most = int(self.scale * (cost.backward_held_bytes if backward else cost.forward_live_bytes))
        most += self._largest(self.shard) if backward and not self.plan.deferred else 0
        beside = self.memory.in_use(self.files, self.saved.keys())
        wanted = max(0, most - beside - size)
        if wanted >= self._reserve(self._kind, self.shard):
            return False
        self.memory.reserve_less(wanted)
        return True

    def _largest(self, shard: PlannedShard) -> int:
        return max((entry.size for bundle in shard.bundles for entry in bundle.weights.fields), default=0)

    # What the model does

    def _on_call(self, name: str, module: nn.Module, _arguments: Any) -> None:
        """Enter the shard of a module that is about to be called, and attach the module's parameters."""
        if not self._running:
            return
        if self._kind in ("forward", "evaluate"):
            self.enter(self._kind, self._path.call(name))
        for parameter in dict.values(module._parameters):
            if parameter is not None:
                self._on_access(parameter)

    def _on_access(self, parameter: nn.Parameter) -> None:
        """Attach a parameter that user code asks for: it may be one of another shard."""
        if self._running and self.shard is not None:
            name = self._names.get(id(parameter))
            if name is not None:
                self.attach(name)

    def _pack(self, tensor: torch.Tensor) -> Any:
        assert self.shard is not None
        self._sweep()
        due = self.due(f"a/{self.shard.index}", 0)
        try:
            return self.saved.pack(tensor, self.shard.index, due)
        except OutOfDeviceMemory:
            if not self.reserve_less(tensor.untyped_storage().nbytes()):
                raise
            return self.saved.pack(tensor, self.shard.index, due)

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, Handle):
            return saved  # type: ignore[no-any-return]
        self.saved.check(saved)
        if self._kind == "backward":
            self.enter("backward", saved.shard)
        self._sweep()
        window = saved.window
        tensor = strided(self._held.hold(window.key), window.dtype, window.offset, window.shape, window.stride)
        tensor = tensor.conj() if saved.conj else tensor
        return tensor._neg_view() if saved.neg else tensor

    def _sweep(self) -> None:
        for key in self.saved.sweep():
            self._held.drop(key)

    # A batch

    @contextmanager
    def running(self, kind: str) -> Iterator[None]:
        """Run the model within the block, where it can be called: for training, or for evaluation."""
        self._path.begin()
        self._running, self._kind = True, kind
        self.enter(kind, 0)
        try:
            if kind == "evaluate":
                yield
            else:
                with saved_tensors_hooks(self._pack, self._unpack):
                    yield
        except BaseException:
            self.abandon()
            raise

    def backward(self, total: torch.Tensor) -> None:
        """Run the backward of all shards; each finished gradient goes to `on_gradient`."""
        assert self.shard is not None
        self.enter("backward", self.shard.index)
        try:
            total.backward()  # type: ignore[no-untyped-call]
        except BaseException:
            self.abandon()
            raise

    def gradient_of(self, name: str) -> HeldBlocks:
        """Enter the shard that makes the step of a finished gradient, if one shard alone uses the parameter."""
        users = self._bundle_of[name].users
        if len(users) == 1:
            self.enter("backward", users[0])
        self.attach(name)
        return self._held

    def still_needed(self, name: str) -> bool:
        """True if the running backward will read a parameter again, though its gradient is finished.

        This happens where the model uses a weight in two places, one of them without a gradient: `weight.detach()`.
        """
        self._sweep()
        return self.saved.wants(*self._places[name])

    def gradients(self, bundle: Bundle) -> dict[str, torch.Tensor]:
        """Return a bundle's waiting gradients by name, as views of their block; a new block is made of zeros."""
        key = f"g/{bundle.name}"
        if self.memory.holds(self.files, key) or self.files.find(key) is not None:
            block = self._held.hold(key)
        else:
            block = self._held.make(key, bundle.gradients.size).zero_()
        self._held.change(key)
        return bundle.gradients.views(block)

    def bundle_of(self, name: str) -> Bundle:
        """Return the bundle of parameters that are moved together with this one."""
        return self._bundle_of[name]

    def end_batch(self) -> None:
        """End the batch: release the shard, and discard the activations that are left."""
        self.leave()
        self._running = False
        for key in self.saved.clear():
            self.memory.discard(self.files, key)
        self.batch_base += self.steps_a_batch


@contextmanager
def _requiring_gradients(parameter: nn.Parameter) -> Iterator[None]:
    """Let hooks be set on a frozen parameter too, which user code may thaw."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    yield
    if frozen:
        parameter.requires_grad_(False)


def _call(weak: WeakMethod[Callable[[str, nn.Parameter], None]], name: str, parameter: nn.Parameter) -> None:
    if on_gradient := weak():
        on_gradient(name, parameter)
