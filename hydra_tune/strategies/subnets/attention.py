"""Finds heads by following a recorded attention: back to the layers of its queries, keys and values, on to the next.

This recognises attention as most models write it, with dense layers of their own around torch's
`scaled_dot_product_attention`. A test shows that the entries found are those of a head: while a head's columns in the
layer after the attention are zero, its queries, keys and values must not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from hydra_tune.core.trees import call_model
from hydra_tune.graph.capture import untouched
from hydra_tune.graph.layers import is_conv1d
from hydra_tune.graph.program import Op, Program, Ref
from hydra_tune.strategies.subnets.neurons import is_dense
from hydra_tune.strategies.subnets.structure import Cut, Group

COUNTS = (
    "num_heads", "num_attention_heads", "num_key_value_heads", "n_heads", "n_head", "split_size", "all_head_size",
    "inner_dim",
)  # fmt: skip
"""Attributes of attention modules that are in proportion to the number of heads."""

_SIZES = ("size", "numel")


def attentions(model: nn.Module, program: Program, shapes: Mapping[int, tuple[int, ...]], pilot: Any) -> list[Group]:
    """Return the heads of each attention between dense layers of its own."""
    found: list[Group] = []
    for index, op in enumerate(program.training):
        if op.target is F.scaled_dot_product_attention:
            group = _heads(model, program, shapes, op, program.value_of(index))
            if group is not None and group.width > 1 and _is_apart(model, pilot, group):
                found.append(group)
    return found


def _heads(
    model: nn.Module, program: Program, shapes: Mapping[int, tuple[int, ...]], op: Op, value: int
) -> Group | None:
    given = [each.value for each in op.args[:3] if isinstance(each, Ref)]
    after = _layer_after(model, program, value)
    layers = [_layer_before(model, program, each) for each in given]
    if len(given) < 3 or after is None or None in layers or len(shapes[given[0]]) != 4:
        return None
    before = [str(name) for name in layers]
    heads, size = shapes[given[0]][1], shapes[given[0]][-1]
    if len(set(before)) == 1:
        if _width(model, before[0]) != 3 * heads * size:
            return None
        cuts, width, shared = _outputs(model, before[0], 3, size), heads, 1
    else:
        width = _width(model, before[1]) // size
        if len(set(before)) < 3 or heads % width or _width(model, before[0]) != heads * size:
            return None
        shared = heads // width
        if _width(model, before[2]) != width * shapes[given[2]][-1]:
            return None
        inner = (shared * size, size, shapes[given[2]][-1])
        cuts = [cut for name, each in zip(before, inner, strict=True) for cut in _outputs(model, name, 1, each)]
    last = Cut(f"{after}.weight", 0 if _is_turned(model, after) else 1, 1, shared * shapes[given[2]][-1], scaled=True)
    return Group(before[0].rpartition(".")[0], "heads", width, (*cuts, last))


def adapt_heads(module: nn.Module, group: Group, count: int) -> None:
    """Set the attributes of an attention module that depend on the number of heads."""
    for name in COUNTS:
        value = vars(module).get(name)
        if isinstance(value, int) and value * count % group.width == 0:
            setattr(module, name, value * count // group.width)


def _outputs(model: nn.Module, name: str, outer: int, inner: int) -> list[Cut]:
    cuts = [Cut(f"{name}.weight", 1 if _is_turned(model, name) else 0, outer, inner)]
    if getattr(model.get_submodule(name), "bias", None) is not None:
        cuts.append(Cut(f"{name}.bias", 0, outer, inner))
    return cuts


def _is_turned(model: nn.Module, name: str) -> bool:
    return is_conv1d(model.get_submodule(name))


def _width(model: nn.Module, name: str) -> int:
    """Return the number of a dense layer's outputs."""
    weight: Any = model.get_submodule(name).weight
    return int(weight.shape[1 if _is_turned(model, name) else 0])


def _layer_before(model: nn.Module, program: Program, value: int) -> str | None:
    """Return the one dense layer that a value comes from; None if there are several, or other layers."""
    first = len(program.inputs)
    waiting, seen, found = [value], set[int](), set[str]()
    while waiting:
        at = waiting.pop()
        if at in seen or at < first:
            continue
        seen.add(at)
        op = program.training[at - first]
        if op.kind == "module" and is_dense(model.get_submodule(str(op.target))):
            found.add(str(op.target))
        elif _learns(model, op):
            return None
        elif op.target not in _SIZES:
            waiting += op.refs()
    return found.pop() if len(found) == 1 else None


def _layer_after(model: nn.Module, program: Program, value: int) -> str | None:
    """Return the one dense layer that takes a value; None if anything else does."""
    waiting, found = [value], set[str]()
    while waiting:
        at = waiting.pop()
        if at in program.results:
            return None
        for index, op in enumerate(program.training):
            if at not in op.refs():
                continue
            if op.kind == "module" and is_dense(model.get_submodule(str(op.target))):
                found.add(str(op.target))
            elif _learns(model, op):
                return None
            elif op.target not in _SIZES:
                waiting.append(program.value_of(index))
    return found.pop() if len(found) == 1 else None


def _learns(model: nn.Module, op: Op) -> bool:
    """True if an operation has parameters."""
    names = dict(model.named_parameters())
    if op.kind == "module":
        return any(True for _ in model.get_submodule(str(op.target)).parameters())
    return any(name in names for name in op.attributes())


@torch.no_grad()
def _is_apart(model: nn.Module, pilot: Any, group: Group) -> bool:
    """True if the entries of some heads have no effect while the next layer's columns for them are zero."""
    parameters = dict(model.named_parameters())
    kept = {cut.parameter: parameters[cut.parameter].clone() for cut in group.cuts}
    modes = {module: module.training for module in model.modules()}
    members = torch.arange(0, group.width, 2)
    try:
        model.eval()
        *before, last = group.cuts
        parameters[last.parameter].index_fill_(last.dim, last.index(members, group.width), 0.0)
        with untouched(model):
            expected = _numbers(call_model(model, pilot))
        for cut in before:
            parameters[cut.parameter].index_fill_(cut.dim, cut.index(members, group.width), 0.37)
        with untouched(model):
            found = _numbers(call_model(model, pilot))
    finally:
        for name, value in kept.items():
            parameters[name].copy_(value)
        for module, mode in modes.items():
            module.training = mode
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def _numbers(outputs: Any) -> Sequence[torch.Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
