"""A model as a straight line of operations that can be run from any point to any other.

A `Program` is what capture makes of a model: its leaf modules and the functions between them, in the order in which the
model calls them, for training and for evaluation. The modules are the model's own, so that names, modes and hooks stay
as they are; only the control flow between them is written down. It holds no tensors and travels between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves, tree_map

from hydra_tune.core.errors import CandidateError, nearest

HALF = torch.bfloat16
"""The 16-bit type of mixed precision; it has the exponents of float32, so gradients need no scaling."""
FAILED_AT = "failed_at_operation"
"""Attribute of an exception: the number of the operation that raised it."""


@dataclass(frozen=True)
class Ref:
    """Reference, in an operation's arguments, to the result of the input or operation number `value`."""

    value: int


@dataclass(frozen=True)
class Attribute:
    """Reference, in an operation's arguments, to a parameter or buffer of the model by its name."""

    name: str


@dataclass(frozen=True)
class Built:
    """An object with values in it, such as a model's output class or a cache, which is made anew from its parts."""

    how: str
    """`tree`: by torch's registry of containers; `fields`: a named tuple; `object`: by its attributes."""
    kind: type
    parts: tuple[Any, ...]
    context: Any = None

    def made(self, parts: Sequence[Any]) -> Any:
        """Return the object with these parts."""
        if self.how == "tree":
            return SUPPORTED_NODES[self.kind].unflatten_fn(list(parts), self.context)
        if self.how == "fields":
            return self.kind(*parts)
        made: Any = object.__new__(self.kind)
        made.__dict__.update(zip(self.context, parts, strict=True))
        return made


@dataclass(frozen=True)
class Op:
    """One call: of a module by its name, of a function, or of a value's method by its name."""

    kind: str
    """Kind of the call: `module`, `function` or `method`."""
    target: str | Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    grad: bool = True
    """False for a call that the model makes without gradients."""

    def refs(self) -> set[int]:
        """Return the numbers of the values that it uses."""
        return {leaf.value for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, Ref)}

    def attributes(self) -> set[str]:
        """Return the names of parameters and buffers that it uses, without those of a module that it calls."""
        return {leaf.name for leaf in leaves((self.args, self.kwargs)) if isinstance(leaf, Attribute)}

    @property
    def label(self) -> str:
        return self.target if isinstance(self.target, str) else getattr(self.target, "__name__", str(self.target))


@dataclass(frozen=True)
class Program:
    """Operations in order. Value i is input i, for i below the number of inputs; then come the operations' results."""

    inputs: tuple[str, ...]
    """Names of the forward's arguments that a batch gives."""
    training: tuple[Op, ...]
    evaluation: tuple[Op, ...]
    """The same operations as in training, with other constants, such as a function's `training=False`."""
    output: Any
    """The model's output: a tree with `Ref`s in it."""
    mutated: frozenset[int] = frozenset()
    """Numbers of the values that a later operation changes in place: a shard that takes one works on a copy."""
    mixed: bool = False
    """True if operations compute in bfloat16 under autocast, with some weights stored in 16 bits."""

    def __len__(self) -> int:
        return len(self.training)

    def on(self, device: torch.device) -> Program:
        """Return the program for another device than the CPU, on which it was recorded."""
        if device.type == "cpu":
            return self

        def there(leaf: Any) -> Any:
            if isinstance(leaf, torch.device) and leaf.type == "cpu":
                return device
            return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

        training, evaluation = (
            tuple(replace(op, args=mapped(op.args, there), kwargs=mapped(op.kwargs, there)) for op in ops)
            for ops in (self.training, self.evaluation)
        )
        return replace(self, training=training, evaluation=evaluation)

    def bind(self, inputs: Any) -> list[Any]:
        """Return a batch's inputs in the program's order: one value, a tuple or list by position, a dict by name."""
        if isinstance(inputs, Mapping):
            for name in inputs:
                if name not in self.inputs:
                    raise CandidateError(f"a batch has an input {name!r}", nearest(str(name), self.inputs))
            return [inputs[name] for name in self.inputs]
        return list(inputs) if isinstance(inputs, tuple | list) else [inputs]

    def value_of(self, op: int) -> int:
        """Return the number of the value that operation `op` gives."""
        return len(self.inputs) + op

    def run(self, model: nn.Module, values: dict[int, Any], start: int, stop: int, *, training: bool) -> None:
        """Run operations `start` to `stop`, reading and adding to `values`; a value is removed after its last use."""
        ops = self.training if training else self.evaluation
        last = _last_uses(ops, range(start, stop))
        with self._computing(values):
            for index in range(start, stop):
                try:
                    values[self.value_of(index)] = _done(ops[index], model, values)
                except Exception as error:
                    setattr(error, FAILED_AT, index)
                    raise
                for value in last.get(index, ()):
                    if value not in self._used_after(stop):
                        del values[value]

    def run_some(
        self, model: nn.Module, values: dict[int, Any], some: Sequence[int], keep: Collection[int], *, training: bool,
        instead: Mapping[int, Callable[..., Any]] | None = None,
    ) -> None:  # fmt: skip
        """Run some operations, in order; values in `keep` stay, any other is removed after its last use.

        `instead` has functions to call in place of some operations.
        """
        ops = self.training if training else self.evaluation
        last = _last_uses(ops, some)
        with self._computing(values):
            for index in some:
                call = instead.get(index) if instead else None
                values[self.value_of(index)] = _done(ops[index], model, values, call)
                for value in last.get(index, ()):
                    if value not in keep:
                        del values[value]

    def _computing(self, values: Mapping[int, Any]) -> AbstractContextManager[Any]:
        if not self.mixed:
            return nullcontext()
        tensors = (leaf for leaf in tree_leaves(list(values.values())) if isinstance(leaf, torch.Tensor))
        return torch.autocast(next((tensor.device.type for tensor in tensors), "cpu"), dtype=HALF)

    def outputs(self, values: Mapping[int, Any]) -> Any:
        """Return the model's output, built from its values; 16-bit tensors become float32, which the loss expects."""
        found = fill(self.output, values, None)
        return in_full(found) if self.mixed else found

    @property
    def results(self) -> frozenset[int]:
        """Numbers of the values that the output is made of."""
        return frozenset(leaf.value for leaf in leaves(self.output) if isinstance(leaf, Ref))

    def crossing(self, op: int) -> frozenset[int]:
        """Return the values that cross a cut right before operation `op`: made before it, used from it on."""
        made = self.value_of(op)
        return frozenset(value for value in self._used_after(op) if value < made)

    def _used_after(self, op: int) -> frozenset[int]:
        cache: dict[int, frozenset[int]] = self.__dict__.setdefault("_uses", {})
        if op not in cache:
            later = (refs for each in self.training[op:] for refs in each.refs())
            cache[op] = frozenset(later) | self.results
        return cache[op]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_uses"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def in_full(outputs: Any) -> Any:
    """Return the output of a model in mixed precision with its 16-bit tensors in float32."""
    return tree_map(
        lambda leaf: leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype == HALF else leaf, outputs
    )


def program_inputs(inputs: Any) -> list[Any]:
    """Return a batch's inputs as a list, in an order that is always the same."""
    if isinstance(inputs, Mapping):
        return [inputs[name] for name in sorted(inputs)]
    return list(inputs) if isinstance(inputs, tuple | list) else [inputs]


def fill(tree: Any, values: Mapping[int, Any], model: nn.Module | None) -> Any:
    """Return the tree with every `Ref` and `Attribute` replaced by the value that it refers to."""

    def filled(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return values[leaf.value]
        if isinstance(leaf, Attribute):
            assert model is not None
            return attribute(model, leaf.name)
        return leaf

    return mapped(tree, filled, build=True)


def mapped(tree: Any, change: Callable[[Any], Any], *, build: bool = False) -> Any:
    """Return the tree with every leaf changed; with `build`, objects are made from their parts."""
    if isinstance(tree, Built):
        parts = tuple(mapped(each, change, build=build) for each in tree.parts)
        return tree.made(parts) if build else replace(tree, parts=parts)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(mapped(each, change, build=build) for each in tree))
    if type(tree) in (tuple, list):
        return type(tree)(mapped(each, change, build=build) for each in tree)
    if type(tree) is dict:
        return {key: mapped(each, change, build=build) for key, each in tree.items()}
    if isinstance(tree, slice):
        return slice(*(mapped(each, change, build=build) for each in (tree.start, tree.stop, tree.step)))
    return change(tree)


def attribute(model: nn.Module, name: str) -> Any:
    """Return a parameter or buffer of the model by its name."""
    *path, last = name.split(".")
    return getattr(model.get_submodule(".".join(path)), last)


def _done(op: Op, model: nn.Module, values: Mapping[int, Any], instead: Callable[..., Any] | None = None) -> Any:
    args, options = fill(op.args, values, model), fill(op.kwargs, values, model)
    with nullcontext() if op.grad else torch.no_grad():
        return _call(op, model, args, options) if instead is None else instead(*args, **options)


def _call(op: Op, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if op.kind == "module":
        return model.get_submodule(str(op.target))(*args, **kwargs)
    if op.kind == "method":
        return getattr(args[0], str(op.target))(*args[1:], **kwargs)
    assert callable(op.target)
    return op.target(*args, **kwargs)


def _last_uses(ops: Sequence[Op], some: Sequence[int]) -> dict[int, list[int]]:
    """Return for each of these operations the values that no later one of them uses."""
    last: dict[int, int] = {}
    for index in some:
        for value in ops[index].refs():
            last[value] = index
    by_op: dict[int, list[int]] = {}
    for value, index in last.items():
        by_op.setdefault(index, []).append(value)
    return by_op


def leaves(tree: Any) -> Iterator[Any]:
    """Yield everything in a tree of arguments that is no container."""
    if isinstance(tree, Built):
        yield from _all_leaves(tree.parts)
    elif type(tree) is dict:
        yield from _all_leaves(tree.values())
    elif type(tree) in (tuple, list) or hasattr(tree, "_fields"):
        yield from _all_leaves(tree)
    elif isinstance(tree, slice):
        yield from _all_leaves((tree.start, tree.stop, tree.step))
    else:
        yield tree


def _all_leaves(trees: Iterable[Any]) -> Iterator[Any]:
    for tree in trees:
        yield from leaves(tree)
