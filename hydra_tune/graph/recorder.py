"""Records a model's forward by watching the functions of torch that it calls while it runs on a pilot batch.

The user's own code runs with real tensors, so dicts, keywords, dataclasses, caches and any Python between the calls
need no special case. Each call becomes an operation whose tensors are referred to by the operation that made them; a
call of one of torch's own layers, or of a module that is closed, is one operation, and its inside is not seen. Sizes
are ints that record their origin (`sizes.py`). A forward that a recording could not repeat on another batch is refused:
one that decides by the contents of a tensor, or that changes attributes of its modules.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves, tree_map

from hydra_tune.graph.layers import is_leaf
from hydra_tune.graph.module_attributes import attributes_of, changed_attributes
from hydra_tune.graph.program import Attribute, Built, Op, Ref, leaves
from hydra_tune.graph.recorded_calls import (
    Applied,
    assigned,
    calls_of_modules,
    einops_called,
    lengths_seen,
    own_gradients,
)  # fmt: skip
from hydra_tune.graph.recorded_trees import (
    as_op,
    contents_of,
    has_tensors,
    holds_tensors,
    name_of,
    own_copy,
    plainly,
    renumbered,
    renumbered_op,
)  # fmt: skip
from hydra_tune.graph.sizes import Number, Size, counted, is_recorded, pinned, plain, sized, sizes_recorded

MOST_CONSTANT = 1 << 20
"""Most bytes of a tensor that is written into a recording."""
_CONTENTS = {
    "__bool__": "a decision", "__int__": "int()", "__float__": "float()", "__index__": "an index",
    "__complex__": "complex()", "__contains__": "a decision", "item": "a number", "tolist": "a list",
    "numpy": "a NumPy array", "__array__": "a NumPy array", "equal": "a decision", "allclose": "a decision",
    "is_nonzero": "a decision",
}  # fmt: skip
"""Calls that give the contents of a tensor to code outside torch, with the name of the result for messages."""
_SIZES = {"size", "shape", "numel", "nelement", "__len__"}
_PARTS = {"unbind", "split", "chunk", "tensor_split", "hsplit", "vsplit", "dsplit", "split_with_sizes", "__iter__"}
"""Calls whose number of results may depend on a size."""
_OF_NOTHING = {"arange", "ones", "zeros", "full", "eye", "tensor", "linspace", "tril_indices", "triu_indices",
               "as_tensor", "scalar_tensor", "finfo", "iinfo"}  # fmt: skip
"""Functions that make a tensor from sizes and constants alone, the same one each time."""
_AT_RANDOM = ("rand", "normal", "bernoulli", "dropout", "multinomial", "uniform", "exponential", "poisson", "empty")
_KEEPS = {"__setitem__", "__delitem__"}
_HOOKS = {"register_hook", "register_post_accumulate_grad_hook"}


class NotRecordable(Exception):
    """Raised if the forward does something that a recording could not repeat."""


class DecidesByContents(NotRecordable):
    """Raised if the forward gives the contents of a tensor to code that a recording does not see."""


class Recorder(TorchFunctionMode):
    """Records one forward; `closed` names modules that are called as a whole."""

    def __init__(self, model: nn.Module, closed: set[str]) -> None:
        super().__init__()
        self.model = model
        self.closed = closed
        self.ops: list[Op] = []
        self.within: list[str] = []
        """For each operation, the innermost module in whose forward it is."""
        self.path: list[str] = [""]
        """Modules whose forward is being recorded, outermost first."""
        self.inputs = 0
        self.failed_in = ""
        """Innermost module whose forward could not be recorded."""
        self.recording = False
        self.removable: set[int] = set()
        """Operations that only return a size or a part of a result; they are removed if nothing uses them."""
        self.steady: set[int] = set()
        """Values that depend on sizes and constants alone."""
        self._known: dict[int, tuple[Any, Any]] = {}
        """By identity, each tensor seen, kept alive, and what stands for it in a recording."""
        self._same: dict[Any, Any] = {}
        self.numbers: set[int] = set()
        """Operations that give a number, made of sizes."""
        self.names: dict[int, str] = {}
        """By identity, the first name of each module."""
        for name, module in model.named_modules():
            self.names.setdefault(id(module), name)
        for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
            self._known[id(tensor)] = tensor, Attribute(name)

    # Running

    def record(self, given: Mapping[str, Any], call: Callable[[Mapping[str, Any]], Any]) -> Any:
        """Call the model with these inputs and return its output, in which references stand for values."""
        self.inputs = len(given)
        before = attributes_of(self.model)
        own = {name: tree_map(own_copy, value) for name, value in given.items()}
        seen = calls_of_modules(self), own_gradients(self), einops_called(self), lengths_seen(self), sizes_recorded()
        with ExitStack() as stack, torch.enable_grad():
            for each in (self, *seen):
                stack.enter_context(each)
            self.recording = True
            try:
                entered = {name: self._enter(Ref(i), value) for i, (name, value) in enumerate(own.items())}
                output = self._stands(call(entered))
            finally:
                self.recording = False
        for name, changed in changed_attributes(self.model, before):
            if not self._is_closed(name):
                self.failed_in = name
                raise NotRecordable(f"its forward changes {', '.join(changed)}")
        return self._without_unused(output)

    def _enter(self, ref: Ref, value: Any) -> Any:
        """Return an input for the forward: numbers record their origin, other plain values are pinned."""
        if isinstance(value, torch.Tensor):
            self._known[id(value)] = value, ref
            return value
        if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
            return type(value)(self._enter(self._part(ref, i), each) for i, each in enumerate(value))
        if isinstance(value, Mapping):
            return {key: self._enter(self._part(ref, key), each) for key, each in value.items()}
        if isinstance(value, int | float) and not isinstance(value, bool):
            return sized(value, self, ref.value)
        if value is None or isinstance(value, str | bool):
            self._add(Op("function", pinned, (ref, value)))
        return value

    def _is_closed(self, name: str) -> bool:
        path = name.split(".") if name else []
        outer = [".".join(path[: i + 1]) for i in range(len(path))]
        return any(self.is_leaf(self.model.get_submodule(each), each) for each in outer)

    def is_leaf(self, module: nn.Module, name: str) -> bool:
        return name in self.closed or is_leaf(module)

    # Calls

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if not self.recording:
            return func(*args, **options)
        name = name_of(func)
        if name in _SIZES and args and isinstance(self._stands(args[0]), Ref):
            return self._size(name, func, args, options)
        result = func(*plainly(args), **plainly(options))
        if name in _KEEPS:
            return self._assigned(name, args, result)
        if not has_tensors(result):
            self._gave_no_tensor(name, func, args, options, result)
            return result
        if name in ("__get__", "__set__"):
            raise NotRecordable(f"an attribute of a tensor is set ({func.__self__.__name__})")
        self._made(as_op(name, func, self._stands(args), self._stands(options)), result, name)
        return result

    def _size(self, name: str, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Return the size of a tensor, as numbers that record their origin."""
        found = func(*plainly(args), **plainly(options))
        tensor = args[0]
        if name == "__len__":
            self.require(pinned, self._dimension(tensor, 0), found)
            return found
        if name in ("numel", "nelement"):
            return self._number(Op("method", "numel", (self._stands(tensor),)), found)
        if isinstance(found, torch.Size):
            return torch.Size([self._dimension(tensor, i) for i in range(len(found))])
        (at,) = plainly((*args[1:], *options.values()))
        return self._dimension(tensor, at % tensor.dim())

    def _dimension(self, tensor: torch.Tensor, at: int) -> Any:
        return self._number(Op("method", "size", (self._stands(tensor), at)), tensor.size(at))

    def _number(self, op: Op, found: Any) -> Any:
        """Record an operation that gives a number, once."""
        key = op.target, tuple(op.args)
        if key not in self._same:
            ref = self._add(op, removable=True)
            self.numbers.add(ref.value - self.inputs)
            self._same[key] = sized(found, self, ref.value)
        return self._same[key]

    def compute(self, function: Callable[..., Any], *args: Any) -> Any:
        found = function(*map(plain, args))
        return self._number(Op("function", function, self._stands(args)), found)

    def require(self, check: Callable[..., Any], *args: Any) -> None:
        op = Op("function", check, self._stands(args))
        if (key := (check, tuple(op.args))) not in self._same:
            self._same[key] = self._add(op)

    def _assigned(self, name: str, args: tuple[Any, ...], result: Any) -> Any:
        """Record `x[...] = value`: from here on the tensor is the result."""
        if name != "__setitem__":
            raise NotRecordable("it deletes a part of a tensor")
        self._known[id(args[0])] = args[0], self._add(Op("function", assigned, self._stands(args)))
        return result

    def _gave_no_tensor(self, name: str, func: Any, args: Any, options: Any, result: Any) -> None:
        """Refuse a result that depends on contents; keep as a check one that depends on sizes alone."""
        if name == "__set__":
            raise NotRecordable(f"an attribute of a tensor is set ({func.__self__.__name__})")
        if name in _HOOKS or (name == "__get__" and func.__self__.__name__ == "grad_fn" and result is not None):
            raise NotRecordable("it sets hooks on a tensor, or looks at how a tensor was made")
        if name not in _CONTENTS:
            return
        refs = [leaf for leaf in leaves((self._stands(args), self._stands(options))) if isinstance(leaf, Ref)]
        attributes = [leaf for leaf in leaves((self._stands(args),)) if isinstance(leaf, Attribute)]
        if attributes or not all(ref.value in self.steady for ref in refs):
            raise DecidesByContents(f"{_CONTENTS[name]} of a tensor's contents")
        if isinstance(result, bool | int | float):
            got = self._add(Op("function", contents_of, (self._stands(args[0]),)))
            self._add(Op("function", pinned, (got, contents_of(args[0]))))

    def _made(self, op: Op, result: Any, name: str) -> None:
        """Record an operation, and note the tensors that it made."""
        given = [leaf for leaf in leaves((op.args, op.kwargs)) if isinstance(leaf, Ref | Attribute)]
        ref = self._add(op, removable=name in _OF_NOTHING or name == "empty")
        tensors = any(isinstance(leaf, Attribute) or not self._is_number(leaf) for leaf in given)
        by_sizes = all(isinstance(leaf, Ref) and (self._is_number(leaf) or leaf.value in self.steady) for leaf in given)
        if by_sizes and (tensors or name in _OF_NOTHING) and not any(each in name for each in _AT_RANDOM):
            self.steady.add(ref.value)
        self._note(ref, result)
        if name in _PARTS and isinstance(result, tuple | list):
            self._add(Op("function", counted, (ref, len(result))))

    def _is_number(self, ref: Any) -> bool:
        index = ref.value - self.inputs
        return index in self.numbers

    def _note(self, ref: Ref, result: Any) -> None:
        """Store the reference that stands for each tensor of a result."""
        if isinstance(result, torch.Tensor):
            if torch._C._functorch.is_functorch_wrapped_tensor(result):
                raise NotRecordable("it uses torch.vmap or torch.func")
            self._known[id(result)] = result, ref
        elif isinstance(result, Mapping):
            for key, each in result.items():
                self._note_part(ref, key, each)
        elif isinstance(result, tuple | list):
            for i, each in enumerate(result):
                self._note_part(ref, i, each)
        elif holds_tensors(result):
            for name, each in vars(result).items():
                if holds_tensors(each):
                    self._note(self._add(Op("function", getattr, (ref, name)), removable=True), each)

    def _note_part(self, ref: Ref, key: Any, part: Any) -> None:
        if holds_tensors(part):
            own = self._part(ref, key)
            if ref.value in self.steady:
                self.steady.add(own.value)
            self._note(own, part)

    def _part(self, ref: Ref, key: Any) -> Ref:
        return self._add(Op("function", operator.getitem, (ref, key)), removable=True)

    def called(self, module: nn.Module, name: str, original: Any, args: Any, kwargs: Any) -> Any:
        """Call a module as a whole, as one operation."""
        given = self._stands(args), self._stands(kwargs)
        with _pop_mode_temporarily(), self._unseen():
            result = original(module, *plainly(args), **plainly(kwargs))
        if any(type(leaf) in (int, float) for leaf in tree_leaves(result)):
            raise NotRecordable(f"{name!r} gives a number that may come of a tensor's contents")
        self._note(self._add(Op("module", name, *given, grad=torch.is_grad_enabled())), result)
        return result

    def applied(self, kind: Any, original: Any, args: Any, kwargs: Any) -> Any:
        """Call a function with a backward of its own, as one operation."""
        if any(callable(leaf) for leaf in tree_leaves((args, kwargs)) if not isinstance(leaf, torch.Tensor)):
            raise NotRecordable(f"{kind.__name__} is given a function, whose tensors a recording would not see")
        return self.function(Applied(kind), args, kwargs, functools.partial(original, kind))

    def function(self, target: Any, args: Any, kwargs: Any, call: Any = None) -> Any:
        """Record a function as one operation; `call` runs it now."""
        given = self._stands(args), self._stands(kwargs)
        with _pop_mode_temporarily(), self._unseen():
            result = (call or target)(*plainly(args), **plainly(kwargs))
        self._made(Op("function", target, *given), result, target.__name__)
        return result

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        self.recording = False
        try:
            yield
        finally:
            self.recording = True

    # What stands for what

    def _add(self, op: Op, *, removable: bool = False) -> Ref:
        self.ops.append(op if torch.is_grad_enabled() else Op(op.kind, op.target, op.args, op.kwargs, grad=False))
        self.within.append(self.path[-1])
        if removable:
            self.removable.add(len(self.ops) - 1)
        return Ref(self.inputs + len(self.ops) - 1)

    def _stands(self, tree: Any, depth: int = 0) -> Any:
        """Return a tree of arguments or results with references in place of tensors and recorded numbers."""
        if isinstance(tree, torch.Tensor):
            return self._tensor(tree)
        if isinstance(tree, Size | Number):
            return Ref(tree.value) if is_recorded(tree) and tree.recorder is self else plain(tree)
        if tree is None or isinstance(tree, int | float | str | torch.dtype | torch.device | nn.Module):
            return tree
        if isinstance(tree, slice):
            return slice(*(self._stands(each) for each in (tree.start, tree.stop, tree.step)))
        if type(tree) in (tuple, list, torch.Size):
            made = [self._stands(each, depth) for each in tree]
            return made if isinstance(tree, list) else tuple(made)
        if type(tree) is dict:
            return {key: self._stands(each, depth) for key, each in tree.items()}
        return self._built(tree, depth) if has_tensors(tree) or holds_tensors(tree) else tree

    def _built(self, tree: Any, depth: int) -> Any:
        """Return an object with tensors in it, such as an output class or a cache, as its parts."""
        if depth > 8:
            raise NotRecordable(f"a {type(tree).__name__} has tensors too deep inside")
        if type(tree) in SUPPORTED_NODES:
            children, context = SUPPORTED_NODES[type(tree)].flatten_fn(tree)
            return Built("tree", type(tree), tuple(self._stands(each, depth + 1) for each in children), context)
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):
            return Built("fields", type(tree), tuple(self._stands(each, depth + 1) for each in tree))
        if isinstance(tree, Mapping | tuple | list):
            raise NotRecordable(f"it passes tensors in a {type(tree).__name__}")
        state = vars(tree)
        return Built("object", type(tree), tuple(self._stands(v, depth + 1) for v in state.values()), tuple(state))

    def _tensor(self, tensor: torch.Tensor) -> Any:
        known = self._known.get(id(tensor))
        if known is not None:
            return known[1]
        if tensor.requires_grad:
            raise NotRecordable("it uses a tensor with a gradient that is no part of the model")
        if tensor.numel() * tensor.element_size() > MOST_CONSTANT:
            raise NotRecordable("it uses a large tensor that is no parameter or buffer of the model")
        self._known[id(tensor)] = tensor, tensor.detach().clone()
        return self._known[id(tensor)][1]

    # The end

    def _without_unused(self, output: Any) -> Any:
        """Remove sizes and parts that nothing uses; return the output, renumbered."""
        used = {leaf.value for leaf in leaves(output) if isinstance(leaf, Ref)}
        kept: list[int] = []
        for index in reversed(range(len(self.ops))):
            if index not in self.removable or self.inputs + index in used:
                kept.append(index)
                used |= self.ops[index].refs()
        number = {self.inputs + index: self.inputs + at for at, index in enumerate(reversed(kept))}
        number |= {i: i for i in range(self.inputs)}
        self.ops = [renumbered_op(self.ops[index], number) for index in reversed(kept)]
        self.within = [self.within[index] for index in reversed(kept)]
        return renumbered(output, number)
