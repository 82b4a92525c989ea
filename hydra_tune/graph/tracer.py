"""Records a model's forward by calling it once on a pilot batch, with values that keep a record.

Built on torch.fx, with three additions. Whatever depends on shapes alone (`b, t = x.shape`, `assert t <= limit`,
`torch.arange(t)`, `for i in range(t)`) works as in an ordinary run, because every record carries its value; what
depends on a tensor's contents is refused. A forward that changes attributes of its module, such as a table that it
keeps for the next call, is refused too: the recording would not do that. And a module whose forward cannot be written
down is called as a whole, so that only its inside cannot be cut.
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

# Functions that make a tensor of nothing: torch.fx sees a function only through a tensor among its arguments.
_FACTORIES = ("arange", "ones", "zeros", "full", "empty", "eye", "tensor", "linspace", "rand", "randn", "randint",
              "tril_indices", "triu_indices")  # fmt: skip


class NotTraceable(Exception):
    """Raised if the forward depends on the contents of tensors or does something else that cannot be recorded."""


class _Record(fx.Proxy):
    """A value of the pilot run, and the operation that it came from."""

    @property
    def _value(self) -> Any:
        return self.node.meta["value"]

    def _plain(self, what: str) -> Any:
        value = self._value
        if isinstance(value, torch.Tensor):
            raise NotTraceable(f"{what} of a tensor's contents")
        self.tracer.depends_on_shapes = True  # type: ignore[attr-defined]
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
        self.tracer.depends_on_shapes |= isinstance(self._value, torch.Tensor)  # type: ignore[attr-defined]
        return len(self._value)

    def __iter__(self) -> Iterator[Any]:
        return iter([operator.getitem(self, i) for i in range(len(self._value))])

    def __hash__(self) -> int:
        return id(self)


class Tracer(fx.Tracer):
    """Records one forward; `opaque` names modules that are called as a whole."""

    proxy_buffer_attributes = True
    """Record a forward's in-place change of a buffer as an operation, instead of making the change once while
    recording."""

    def __init__(self, opaque: set[str]) -> None:
        super().__init__(autowrap_modules=(__import__("math"),))
        self.opaque = opaque
        self.within: list[str] = []
        """Names of the modules whose forward is being recorded, outermost first."""
        self.failed_in = ""
        self.depends_on_shapes = False
        """True if a size became a constant of the recording, which then holds only for inputs of the same sizes."""
        self._executing = 0

    def record(self, model: nn.Module, inputs: dict[str, Any], defaults: dict[str, Any]) -> fx.Graph:
        """Return the graph of `model(**inputs)`; arguments that a batch does not give keep their defaults."""
        self._inputs = inputs | defaults
        before = attributes_of(model)
        with _recording_factories(self), _refusing_custom_gradients(), torch.enable_grad():
            graph = self.trace(model, concrete_args=defaults or None)
        for name, changed in changed_attributes(model, before):
            if not self._is_closed(model, name):
                self.failed_in = name
                raise NotTraceable(f"its forward changes {', '.join(changed)}")
        return graph

    def _is_closed(self, model: nn.Module, name: str) -> bool:
        """True if a module, or one that contains it, is called as a whole."""
        path = name.split(".") if name else []
        outer = [".".join(path[: i + 1]) for i in range(len(path))]
        return any(self.is_leaf_module(model.get_submodule(each), each) for each in outer)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor) and not self._is_known(a):
            # torch.fx would make it an attribute of the model.
            raise NotTraceable("a tensor that is no part of the model")
        return super().create_arg(a)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        own = isinstance(tensor, nn.Parameter) or tensor in self.tensor_attrs
        return own or any(tensor is buffer for buffer in self.root.buffers())

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
            if not self.is_leaf_module(m, name):  # else the one that calls it is to blame
                self.failed_in = self.failed_in or name
            raise
        finally:
            self.within.pop()

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> fx.Node:
        if not torch.is_grad_enabled():
            raise NotTraceable("a part of it runs without gradients")
        node = super().create_node(kind, target, args, kwargs, *rest, **named)
        with torch.no_grad():
            node.meta["value"] = self._run(kind, target, args, kwargs)
        return node

    def _run(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        if kind == "placeholder":
            # An argument that keeps its default is called NAME_1 by torch.fx.
            return self._inputs[target] if target in self._inputs else self._inputs.get(target.rpartition("_")[0])
        if kind == "output":
            return None
        if kind == "get_attr":
            with _as_ever():
                return functools.reduce(getattr, target.split("."), self.root)
        values = fx.node.map_arg((args, kwargs), lambda node: node.meta["value"])
        self._executing += 1
        try:
            return _execute(kind, target, self.root, *values)
        finally:
            self._executing -= 1

    @property
    def recording(self) -> bool:
        """True if the forward itself is running, False during an operation of the pilot run."""
        return not self._executing


def _execute(kind: str, target: Any, root: Any, args: Any, kwargs: Any) -> Any:
    if kind == "call_module":
        with _as_ever():
            return root.get_submodule(target)(*args, **kwargs)
    if kind == "call_method":
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


_CALL = nn.Module.__call__
_GETATTR = nn.Module.__getattr__


@contextmanager
def _as_ever() -> Iterator[None]:
    """Put back, within the block, the methods of modules that torch.fx replaces while it traces."""
    patched, attributes = nn.Module.__call__, nn.Module.__getattr__
    nn.Module.__call__, nn.Module.__getattr__ = _CALL, _GETATTR  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__, nn.Module.__getattr__ = patched, attributes  # type: ignore[method-assign]


Attributes = dict[str, list[dict[str, Any]]]


def attributes_of(model: nn.Module) -> Attributes:
    """Return the attributes, parameters and buffers that each module has now, by the module's name."""
    return {
        name: [dict(each) for each in _dictionaries(module)]
        for name, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)
    }


def changed_attributes(model: nn.Module, before: Attributes) -> Iterator[tuple[str, list[str]]]:
    """Yield each module with attributes that are other objects than before, and the names of those attributes."""
    for module, was in before.items():
        changed = set()
        for now, then in zip(_dictionaries(model.get_submodule(module)), was, strict=True):
            changed |= {key for key in now.keys() | then.keys() if now.get(key) is not then.get(key)}
        if changed:
            yield module, sorted(changed)


def restore_attributes(model: nn.Module, before: Attributes) -> None:
    """Restore the attributes that `attributes_of` returned."""
    for module, was in before.items():
        for now, then in zip(_dictionaries(model.get_submodule(module)), was, strict=True):
            if any(now.get(key) is not then.get(key) for key in now.keys() | then.keys()):
                now.clear()
                now.update(then)


def _dictionaries(module: nn.Module) -> list[dict[str, Any]]:
    return [vars(module), module._parameters, module._buffers]


@contextmanager
def _refusing_custom_gradients() -> Iterator[None]:
    """Refuse, within the block, functions with a backward of their own: a recording would have their forward alone."""
    original = vars(torch.autograd.Function)["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, kwargs))):
            raise NotTraceable(f"{cls.__name__} has a backward of its own")
        return original.__func__(cls, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


@contextmanager
def _recording_factories(tracer: Tracer) -> Iterator[None]:
    originals = {name: getattr(torch, name) for name in _FACTORIES}

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if tracer.recording:
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
