"""A stage's backward in two halves: first what another device waits for, then the gradients of weights.

In the last micro-batch of a step nothing follows that could hide the weights' gradients of a stage, while the device
before it waits. So these come second there, when the gradients of values are on their way (after Zero Bubble pipelines,
arXiv 2401.10241, which do so in all micro-batches). The sums are the same: only their order changes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle


class Halves:
    """One micro-batch on its way through a stage: `watch` its forward, then `first` and `second` half of backward."""

    def __init__(self, layers: Mapping[int, Sequence[nn.Parameter]]) -> None:
        """`layers` are operations whose weights can wait; nobody else uses those."""
        self._layers = {op: [w for w in weights if w.requires_grad] for op, weights in layers.items()}
        self._edges: dict[int, GradientEdge] = {}
        self._hooks: list[RemovableHandle] = []
        self._gradients: dict[int, torch.Tensor] = {}
        self.bytes = 0
        """What the gradients take that are kept from the first half to the second."""

    def watch(self, op: int, output: Any) -> None:
        """An operation of the stage has given this."""
        if self._layers.get(op) and output.requires_grad:
            self._edges[op] = get_gradient_edge(output)
            self._hooks.append(output.register_hook(functools.partial(self._gradients.__setitem__, op)))
            self.bytes += output.numel() * output.element_size()

    def first(
        self, roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], entered: Iterable[torch.Tensor],
        parameters: Iterable[nn.Parameter],
    ) -> None:  # fmt: skip
        """The gradients of values that came in, and of all parameters here but those that can wait."""
        waiting = {id(weight) for op in self._edges for weight in self._layers[op]}
        now = [leaf for leaf in (*entered, *parameters) if leaf.requires_grad and id(leaf) not in waiting]
        if now:
            torch.autograd.backward(roots, gradients, retain_graph=True, inputs=now)
        self.forget_hooks()
        # A layer that no value which came in goes through was passed over: it has no gradient to go on from.
        passed_over = [w for op in self._edges if op not in self._gradients for w in self._layers[op]]
        if passed_over:
            torch.autograd.backward(roots, gradients, retain_graph=True, inputs=passed_over)

    def second(self) -> None:
        """The gradients of the weights that have waited."""
        for op, gradient in self._gradients.items():
            torch.autograd.backward([self._edges.pop(op)], [gradient], inputs=self._layers[op])
        self._gradients.clear()

    def forget_hooks(self) -> None:
        """Let backward run as if nobody had watched."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
