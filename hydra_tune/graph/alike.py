"""Nodes that do the same work: the same calls, with the same settings, on tensors of the same sizes.

Other work on the machine disturbs single measurements, and a cut based on them would be uneven. Most models repeat
their layers, so the median over all nodes of a kind is a more reliable measurement of each.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from statistics import median

import torch
from torch import nn

from hydra_tune.graph.capture import Captured, Node
from hydra_tune.graph.program import Attribute, Op, Ref, attribute, leaves


def kinds_of(model: nn.Module, captured: Captured, sizes: Iterable[Hashable]) -> list[Hashable]:
    """Return the kind of each node, equal for nodes that do the same work; `sizes` has each node's byte counts."""
    operations = captured.program.training
    return [
        (tuple(_call(model, op) for op in operations[node.start : node.stop]), _tensors(model, node), size)
        for node, size in zip(captured.nodes, sizes, strict=True)
    ]


def medians(kinds: Sequence[Hashable], runs: Sequence[Sequence[float]]) -> list[float]:
    """Return for each node the median of its kind's values (such as seconds) over all runs."""
    found: dict[Hashable, list[float]] = {}
    for run in runs:
        for kind, value in zip(kinds, run, strict=True):
            found.setdefault(kind, []).append(value)
    middle = {kind: median(values) for kind, values in found.items()}
    return [middle[kind] for kind in kinds]


def _call(model: nn.Module, op: Op) -> Hashable:
    """Return a key for an operation's call and settings, without the tensors that it works on."""
    does = repr(model.get_submodule(op.target)) if op.kind == "module" and isinstance(op.target, str) else op.label
    settings = [
        type(leaf).__name__ if isinstance(leaf, Ref | Attribute | torch.Tensor) else repr(leaf)
        for leaf in leaves((op.args, op.kwargs))
    ]
    return op.kind, does, tuple(settings)


def _tensors(model: nn.Module, node: Node) -> Hashable:
    found = (attribute(model, name) for name in (*node.parameters, *node.buffers))
    return tuple((tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in found)
