"""Writing down what a model's forward does, by calling it once on a pilot batch with values that keep a record.

Built on torch.fx, with two additions. Whatever depends on shapes alone (`b, t = x.shape`, `assert t <= limit`,
`torch.arange(t)`, `for i in range(t)`) works as in an ordinary run, because every record carries its value; what
depends on a tensor's contents is refused. And a module whose forward cannot be written down is called as a whole, so
that only its inside cannot be cut.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

# Functions that make a tensor from sizes alone: torch.fx sees a function only through a tensor among its arguments.
_FACTORIES = ("arange", "ones", "zeros", "full", "empty", "eye", "tensor", "linspace", "rand", "randn", "randint",
              "tril_indices", "triu_indices")  # fmt: skip


class NotTraceable(Exception):
    """The forward does something that depends on the contents of tensors, or that cannot be recorded."""


class _Record(fx.Proxy):
    """A value of the pilot run and where it came from."""

    @property
    def _value(self) -> Any:
        return self.node.meta["value"]

    def _plain(self, what: str) -> Any:
        value = self._value
        if isinstance(value, torch.Tensor):
            raise NotTraceable(f"{what} of a tensor's contents")
        return value

    def __bool__(self) -> bool:
        return bool(self._plain("a decision"))

    def __index__(self) -> int:
        return int(self._plain("an index"))

    def __int__(self) -> int:
        return int(self._plain("int()"))

    def __float__(self) -> float:
        return float(self._plain("float()"))

    def __len__(self) -> int:
        return len(self._value)

    def __iter__(self) -> Iterator[Any]:
        return iter([operator.getitem(self, i) for i in range(len(self._value))])

    def __hash__(self) -> int:
        return id(self)


class Tracer(fx.Tracer):
    """Records one forward; `opaque` names modules that are called as a whole."""

    def __init__(self, opaque: set[str]) -> None:
        super().__init__(autowrap_modules=(__import__("math"),))
        self.opaque = opaque
        self.within: list[str] = []
        """The modules whose forward is being recorded, outermost first."""
        self.failed_in = ""

    def record(self, model: nn.Module, inputs: dict[str, Any], defaults: dict[str, Any]) -> fx.Graph:
        """The graph of `model(**inputs)`; arguments that a batch does not give keep their defaults."""
        self._inputs = inputs | defaults
        with _recording_factories(self), torch.no_grad():
            return self.trace(model, concrete_args=defaults or None)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.opaque or super().is_leaf_module(m, module_qualified_name)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Record(node, self)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = self.path_of_module(m)
        self.within.append(name)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed_in = self.failed_in or name
            raise
        finally:
            self.within.pop()

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> fx.Node:
        node = super().create_node(kind, target, args, kwargs, *rest, **named)
        node.meta["value"] = self._run(kind, target, args, kwargs)
        return node

    def _run(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        if kind == "placeholder":
            # An argument that keeps its default is called NAME_1 by torch.fx.
            return self._inputs[target] if target in self._inputs else self._inputs.get(target.rpartition("_")[0])
        if kind == "output":
            return None
        if kind == "get_attr":
            return functools.reduce(getattr, target.split("."), self.root)
        values = fx.node.map_arg((args, kwargs), lambda node: node.meta["value"])
        return _execute(kind, target, self.root, *values)


def _execute(kind: str, target: Any, root: Any, args: Any, kwargs: Any) -> Any:
    if kind == "call_module":
        return _Original.call(root.get_submodule(target), args, kwargs)
    if kind == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


class _Original:
    """torch.fx replaces `nn.Module.__call__` while it traces; a module of the pilot run is called as ever."""

    _call = nn.Module.__call__

    @classmethod
    def call(cls, module: nn.Module, args: Any, kwargs: Any) -> Any:
        patched, attributes = nn.Module.__call__, nn.Module.__getattr__
        nn.Module.__call__, nn.Module.__getattr__ = cls._call, _GETATTR  # type: ignore[method-assign]
        try:
            return module(*args, **kwargs)
        finally:
            nn.Module.__call__, nn.Module.__getattr__ = patched, attributes  # type: ignore[method-assign]


_GETATTR = nn.Module.__getattr__


@contextmanager
def _recording_factories(tracer: Tracer) -> Iterator[None]:
    originals = {name: getattr(torch, name) for name in _FACTORIES}

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, kwargs))):
                return tracer.create_proxy("call_function", function, args, kwargs)
            return function(*args, **kwargs)

        return call

    for name, function in originals.items():
        setattr(torch, name, recording(function))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(torch, name, function)
