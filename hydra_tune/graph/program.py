"""A model as a straight line of operations that can be run from any point to any other.

A `Program` is what capture makes of a model: its leaf modules and the functions between them, in the order in which the
model calls them, for training and for evaluation. The modules are the model's own, so that names, modes and hooks stay
as they are; only the control flow between them is written down. It holds no tensors and travels between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from hydra_tune.core.errors import CandidateError, nearest

HALF = torch.bfloat16
"""The 16-bit type of mixed precision; it has the exponents of float32, so gradients need no scaling."""


@dataclass(frozen=True)
class Ref:
    """Reference, in an operation's arguments, to the result of the input or operation number `value`."""

    value: int


@dataclass(frozen=True)
class Attribute:
    """Reference, in an operation's arguments, to a parameter or buffer of the model by its name."""

    name: str


@dataclass(frozen=True)
class Op:
    """One call: of a module by its name, of a function, or of a value's method by its name."""

    kind: str
    """Kind of the call: `module`, `function` or `method`."""
    target: str | Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

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
    shapes: tuple[tuple[int, ...], ...] | None = None
    """Sizes of the inputs' tensors without their rows, if sizes became constants of the recording; else None."""
    mixed: bool = False
    """True if operations compute in bfloat16 under autocast, with some weights stored in 16 bits."""

    def check(self, inputs: Sequence[Any]) -> None:
        """Raise an error for inputs for which the recording may not hold."""
        if self.shapes is not None and shapes_of(inputs) != self.shapes:
            raise CandidateError(
                f"a batch has inputs of sizes {shapes_of(inputs)} instead of {self.shapes}, and the model's forward "
                "decides by sizes",
                "give batches of one size, or use --strategy whole",
            )

    def __len__(self) -> int:
        return len(self.training)

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
                values[self.value_of(index)] = _done(ops[index], model, values)
                for value in last.get(index, ()):
                    if value not in self._used_after(stop):
                        del values[value]

    def run_some(
        self, model: nn.Module, values: dict[int, Any], some: Sequence[int], keep: Collection[int], *, training: bool,
        instead: Mapping[int, Callable[..., Any]] | None = None,
    ) -> None:  # fmt: skip
        """Run some operations, in order; values in `keep` stay, any other is removed after its last use.

        `instead` has functions to call in place of some operations.

        `instead` has calls that take the place of operations.
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


def shapes_of(inputs: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Return the sizes of all tensors among the inputs, without their first dimension, the rows."""
    return tuple(tuple(leaf.shape[1:]) for leaf in tree_leaves(list(inputs)) if isinstance(leaf, torch.Tensor))


def fill(tree: Any, values: Mapping[int, Any], model: nn.Module | None) -> Any:
    """Return the tree with every `Ref` and `Attribute` replaced by the value that it refers to."""
    if isinstance(tree, Ref):
        return values[tree.value]
    if isinstance(tree, Attribute):
        assert model is not None
        return attribute(model, tree.name)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(fill(each, values, model) for each in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(fill(each, values, model) for each in tree)
    if isinstance(tree, Mapping):
        return {key: fill(each, values, model) for key, each in tree.items()}
    if isinstance(tree, slice):
        return slice(*(fill(each, values, model) for each in (tree.start, tree.stop, tree.step)))
    return tree


def attribute(model: nn.Module, name: str) -> Any:
    """Return a parameter or buffer of the model by its name."""
    *path, last = name.split(".")
    return getattr(model.get_submodule(".".join(path)), last)


def _done(op: Op, model: nn.Module, values: Mapping[int, Any], instead: Callable[..., Any] | None = None) -> Any:
    args, options = fill(op.args, values, model), fill(op.kwargs, values, model)
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
    if isinstance(tree, Mapping):
        yield from _all_leaves(tree.values())
    elif isinstance(tree, tuple | list):
        yield from _all_leaves(tree)
    elif isinstance(tree, slice):
        yield from _all_leaves((tree.start, tree.stop, tree.step))
    else:
        yield tree


def _all_leaves(trees: Iterable[Any]) -> Iterator[Any]:
    for tree in trees:
        yield from leaves(tree)
