"""Finds the neurons and filters that can be dealt out, by following each layer's outputs to their users.

The outputs of a dense or convolutional layer form a group. It is followed through elementwise operations (activations,
dropout, normalisation by batch or layer, pooling, flattening) to the layers that use it, whose columns it cuts too. Any
other use, such as a residual addition or being the model's output, closes the group: its members then belong to all
subnets. The model is not run here; a captured program and the shapes of its values suffice.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hydra_tune.graph.layers import is_activation, is_conv1d
from hydra_tune.graph.program import Op, Program, Ref
from hydra_tune.graph.sizes import counted, decided, pinned
from hydra_tune.strategies.subnets.structure import Cut, Group

_DENSE = (nn.Linear,)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_ONE_BY_ONE = (
    nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU,
    nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh,
    nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid,
)  # fmt: skip
_POOLS = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
)  # fmt: skip
_FUNCTIONS = {
    F.relu, torch.relu, F.gelu, F.silu, F.elu, F.leaky_relu, F.mish, F.softplus, F.hardswish, F.dropout, torch.tanh,
    torch.sigmoid, F.tanh, F.sigmoid, F.relu6, F.selu,
}  # fmt: skip
_METHODS = {"relu", "relu_", "tanh", "sigmoid", "contiguous", "clone"}
_SIZES = {"size", "numel", counted, decided, pinned}
"""Operations that only ask for a size."""
_POOL_FUNCTIONS = {F.max_pool1d, F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, F.adaptive_max_pool2d}
_SUMS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_PRODUCTS = {operator.mul, operator.truediv, torch.mul, torch.div, "mul", "mul_", "div", "div_", "__rmul__"}


@dataclass(frozen=True)
class _Flow:
    """The dimension of a value that holds a group's members, each `inner` times in a row."""

    group: str
    dim: int
    inner: int = 1


@dataclass
class _Open:
    """A group that is being followed."""

    kind: str
    width: int
    cuts: list[Cut] = field(default_factory=list)
    closed: str = ""
    """Reason why its members belong to all subnets."""
    taken: bool = False
    """True if some layer uses the members as input."""


class Neurons:
    """The groups of one captured model."""

    def __init__(self, model: nn.Module, program: Program, shapes: Mapping[int, tuple[int, ...]]) -> None:
        self.model = model
        self.program = program
        self.shapes = shapes
        self.open: dict[str, _Open] = {}
        self.flows: dict[int, _Flow] = {}
        self._users = Counter(value for op in program.training for value in op.refs())
        self._calls = Counter(op.target for op in program.training if op.kind == "module")
        self._tensors = _names_of_untied(model)
        for index, op in enumerate(program.training):
            flow = self._follow(op, program.value_of(index))
            if flow is not None:
                self.flows[program.value_of(index)] = flow
        for value in program.results:
            self._close(value, "they are the model's output")

    def groups(self) -> list[Group]:
        """Return the groups that can be dealt out."""
        first = {id(group): name for name, group in reversed(self.open.items())}
        usable = {
            name: group
            for name, group in self.open.items()
            if not group.closed and group.taken and first[id(group)] == name
        }
        return [Group(name, g.kind, g.width, tuple(g.cuts)) for name, g in usable.items()]

    def closed(self) -> dict[str, str]:
        """Return, for the other layers, the reason why their outputs belong to all subnets."""
        return {name: g.closed or "no layer takes them in" for name, g in self.open.items() if g.closed or not g.taken}

    def _follow(self, op: Op, value: int) -> _Flow | None:
        """Return the position of a group's members in an operation's result."""
        if op.target in _SIZES:
            return None
        known = self._gated(op) or self._through(op, value)
        if known is None:
            for ref in op.refs():
                self._close(ref, f"{op.label} mixes them")
            return None
        return known[0]

    def _gated(self, op: Op) -> tuple[_Flow] | None:
        """Join the groups of two layers whose outputs are multiplied, such as a gate and its input."""
        if op.target not in _PRODUCTS or len(op.args) != 2 or not all(isinstance(each, Ref) for each in op.args):
            return None
        one, other = (self.flows.get(each.value) for each in op.args)
        if one is None or other is None or (one.dim, one.inner) != (other.dim, other.inner):
            return None
        kept, joined = self.open[one.group], self.open[other.group]
        if kept is not joined:
            if (kept.kind, kept.width) != (joined.kind, joined.width):
                return None
            kept.cuts += joined.cuts
            kept.closed, kept.taken = kept.closed or joined.closed, kept.taken or joined.taken
            self.open[other.group] = kept
        return (one,)

    def _through(self, op: Op, value: int) -> tuple[_Flow | None] | None:
        """Return the flow in the result, in a tuple; None for an unknown operation."""
        if not op.args or not isinstance(op.args[0], Ref) or len(op.refs()) != 1:
            return None
        source = op.args[0].value
        flow = self.flows.get(source)
        if op.kind == "module":
            return self._module(str(op.target), flow, source, value)
        if op.target in _FUNCTIONS or op.target in _METHODS or (op.target in _PRODUCTS and not op.attributes()):
            return (flow,)
        if op.target in _POOL_FUNCTIONS:
            return (flow,) if flow is None or flow.dim == 1 else None
        if op.target in (torch.flatten, "flatten"):
            return self._flattened(flow, source, value)
        if op.target in (torch.mean, "mean") and flow is not None:
            # A mean over the image only: rows and channels remain.
            kept = self.shapes[value] == self.shapes[source][:2] and flow.dim == 1
            return (flow,) if kept else None
        return (None,) if flow is None else None

    def _module(self, name: str, flow: _Flow | None, source: int, value: int) -> tuple[_Flow | None] | None:
        module = self.model.get_submodule(name)
        if is_one_by_one(module):
            return (flow,)
        if isinstance(module, _POOLS):
            return (flow,) if flow is None or flow.dim == 1 else None
        if isinstance(module, nn.Flatten):
            return self._flattened(flow, source, value)
        if self._calls[name] > 1 or not self._is_own(name, module):
            return None
        last = len(self.shapes[source]) - 1
        if is_dense(module):
            return self._layer(name, "neurons", last, flow, value)
        if isinstance(module, _CONVOLUTIONS) and module.groups == 1:
            return self._layer(name, "filters", 1, flow, value)
        if isinstance(module, _BATCH_NORMS) and (flow is None or flow.dim == 1):
            return self._norm(name, module, flow)
        if (
            isinstance(module, nn.LayerNorm)
            and len(module.normalized_shape) == 1
            and (flow is None or flow.dim == last)
        ):
            return self._norm(name, module, flow)
        return None

    def _layer(self, name: str, kind: str, dim: int, flow: _Flow | None, value: int) -> tuple[_Flow | None] | None:
        """Cut the columns of a layer by its input's group, and open a group for its outputs."""
        out = 1 if is_conv1d(self.model.get_submodule(name)) else 0
        if flow is not None:
            if flow.dim != dim:
                return None
            taken = self.open[flow.group]
            taken.taken = True
            taken.cuts.append(Cut(f"{name}.weight", 1 - out, 1, flow.inner, scaled=not self._normalised(value)))
        at = len(self.shapes[value]) - 1 if kind == "neurons" else 1
        width = self.shapes[value][at]
        owned = [(own, out if own == "weight" else 0) for own in ("weight", "bias")]
        cuts = [Cut(f"{name}.{own}", dim) for own, dim in owned if f"{name}.{own}" in self._tensors]
        self.open[name] = _Open(kind, width, cuts)
        return (_Flow(name, at),)

    def _norm(self, name: str, module: nn.Module, flow: _Flow | None) -> tuple[_Flow | None]:
        """Cut a norm's parameters, which have one entry per member."""
        if flow is not None:
            tensors = [own for own in ("weight", "bias", "running_mean", "running_var") if hasattr(module, own)]
            found = [f"{name}.{own}" for own in tensors if getattr(module, own) is not None]
            self.open[flow.group].cuts += [Cut(each, 0, 1, flow.inner) for each in found]
        return (flow,)

    def _flattened(self, flow: _Flow | None, source: int, value: int) -> tuple[_Flow | None] | None:
        """Return the flow after flattening all but the rows: a filter's image becomes consecutive entries."""
        if flow is None:
            return (None,)
        before, after = self.shapes[source], self.shapes[value]
        if flow.dim != 1 or len(after) != 2 or after[0] != before[0]:
            return None
        return (_Flow(flow.group, 1, flow.inner * (after[1] // before[1])),)

    def _normalised(self, value: int) -> bool:
        """True if a layer's outputs go directly into a norm, which cancels any factor."""
        users = [op for op in self.program.training if value in op.refs()]
        if len(users) != 1 or users[0].kind != "module":
            return False
        return isinstance(self.model.get_submodule(str(users[0].target)), (*_BATCH_NORMS, nn.LayerNorm))

    def _is_own(self, name: str, module: nn.Module) -> bool:
        """True if the module's parameters are its own: neither tied nor computed from others."""
        return all(f"{name}.{own}" in self._tensors for own, _ in module.named_parameters(recurse=False))

    def _close(self, value: int, why: str) -> None:
        flow = self.flows.get(value)
        if flow is not None and not self.open[flow.group].closed:
            self.open[flow.group].closed = why


def _names_of_untied(model: nn.Module) -> set[str]:
    counts = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return {name for name, p in model.named_parameters() if counts[id(p)] == 1}


def is_sum(op: Op) -> bool:
    """True if the operation adds two values."""
    return op.target in _SUMS and len(op.args) == 2 and all(isinstance(each, Ref) for each in op.args)


def is_one_by_one(module: Any) -> bool:
    """True if the module is elementwise."""
    return isinstance(module, _ONE_BY_ONE) or is_activation(module)


def is_dense(module: nn.Module) -> bool:
    """True if the module is a dense layer, of torch or of transformers."""
    return isinstance(module, _DENSE) or is_conv1d(module)
