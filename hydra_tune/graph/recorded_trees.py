"""Trees of arguments and results while a model is recorded: which tensors are in them, and their plain form."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hydra_tune.graph.program import Op, Ref, mapped
from hydra_tune.graph.sizes import Number, Size, plain

MOST_OBJECTS, DEEPEST = 10_000, 4
"""Objects that are looked into for tensors, and how deep inside each other."""


def contents_of(tensor: torch.Tensor) -> list[Any]:
    """Return the contents of a tensor as a list."""
    found = tensor.tolist()
    return found if isinstance(found, list) else [found]


def own_copy(leaf: Any) -> Any:
    """Return a copy of a tensor, which a forward may change; anything else as it is."""
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


def name_of(func: Any) -> str:
    """Return the name of a function, or of the property that it gets."""
    name = getattr(func, "__name__", type(func).__name__)
    of = getattr(func, "__self__", None)
    return str(getattr(of, "__name__", name)) if name == "__get__" else str(name)


def as_op(name: str, func: Any, args: Any, kwargs: Any) -> Op:
    """Return a call as an operation: of a tensor's method by its name where it is one."""
    if getattr(func, "__name__", "") == "__get__":
        return Op("function", getattr, (args[0], name), {})
    home = str(getattr(func, "__qualname__", "")).split(".")[0]
    if (home in ("Tensor", "TensorBase") or hasattr(func, "__objclass__")) and hasattr(torch.Tensor, name):
        return Op("method", name, args, kwargs)
    return Op("function", func, args, kwargs)


def has_tensors(tree: Any) -> bool:
    """True if a tree has a tensor in it."""
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(tree))


def holds_tensors(thing: Any) -> bool:
    """True if an object is a tensor or recorded number, or has some inside, as a cache has among its attributes."""
    waiting, seen = [(thing, 0)], set[int]()
    while waiting and len(seen) < MOST_OBJECTS:
        each, depth = waiting.pop()
        if isinstance(each, torch.Tensor | Size | Number):
            return True
        if id(each) in seen or depth > DEEPEST or isinstance(each, nn.Module | type | ModuleType) or callable(each):
            continue
        seen.add(id(each))
        if isinstance(each, tuple | list):
            inside: Any = each
        else:
            inside = each.values() if isinstance(each, Mapping) else getattr(each, "__dict__", {}).values()
        waiting += [(one, depth + 1) for one in inside]
    return False


def plainly(tree: Any) -> Any:
    """Return arguments with ordinary numbers in place of recorded ones."""
    if isinstance(tree, Size | Number):
        return plain(tree)
    if isinstance(tree, slice):
        return slice(*(plainly(each) for each in (tree.start, tree.stop, tree.step)))
    if type(tree) in (tuple, list):
        return type(tree)(plainly(each) for each in tree)
    if isinstance(tree, torch.Size):
        return torch.Size([plain(each) for each in tree])
    if type(tree) is dict:
        return {key: plainly(each) for key, each in tree.items()}
    return tree


def renumbered_op(op: Op, number: Mapping[int, int]) -> Op:
    """Return an operation whose values have other numbers."""
    return Op(op.kind, op.target, renumbered(op.args, number), renumbered(op.kwargs, number), op.grad)


def renumbered(tree: Any, number: Mapping[int, int]) -> Any:
    """Return a tree whose values have other numbers."""
    return mapped(tree, lambda leaf: Ref(number[leaf.value]) if isinstance(leaf, Ref) else leaf)
