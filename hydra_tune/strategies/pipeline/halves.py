"""A stage's backward in two halves: first the gradients another device waits for, then those of the weights.

In the last micro-batch of a step no other work hides a stage's weight gradients, while the previous device waits. So
there they are computed second, after the gradients of values are sent (after Zero Bubble pipelines, arXiv 2401.10241,
which do so in all micro-batches). For autograd such a layer is one operation, whose backward returns the gradient of
its input and keeps the tensors for the weight gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


class Halves:
    """Layers of one stage for one micro-batch: `instead` replaces their forward, `second` follows the backward."""

    def __init__(self, layers: Mapping[int, nn.Module], *, waits: bool) -> None:
        """Without `waits` layers run as usual, and only the bytes that waiting would keep are counted."""
        self.instead: dict[int, Callable[..., Any]] = {
            op: functools.partial(self._layer, module) for op, module in layers.items()
        }
        self.bytes = 0
        """Bytes kept from the first half to the second: the gradients of the layers' outputs."""
        self._waits = waits
        self._kept: list[tuple[nn.Module, torch.Tensor, torch.Tensor]] = []

    def _layer(self, module: nn.Module, *args: Any, **options: Any) -> Any:
        if options or len(args) != 1 or not _can_wait(module, args[0]):
            return module(*args, **options)
        output = _InputFirst.apply(args[0], module, self._keep) if self._waits else module(*args)  # type: ignore[no-untyped-call]
        self.bytes += output.numel() * output.element_size()
        return output

    def _keep(self, module: nn.Module, inputs: torch.Tensor, gradient: torch.Tensor) -> None:
        self._kept.append((module, inputs.detach(), gradient.detach()))

    def second(self) -> None:
        """Compute the deferred weight gradients and accumulate them as autograd does."""
        while self._kept:
            module, inputs, gradient = self._kept.pop()
            _Weights.apply(module.weight, module.bias, module, inputs, gradient).backward()  # type: ignore[no-untyped-call]


def is_plain(module: nn.Module) -> bool:
    """True if calling the layer does only what its class defines: no hooks, zero padding."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    padded = isinstance(module, nn.Linear) or (module.padding_mode == "zeros" and not isinstance(module.padding, str))
    return padded and not any(hooks)


def _can_wait(module: nn.Module, inputs: Any) -> bool:
    weight: Any = module.weight
    if not isinstance(inputs, torch.Tensor) or not inputs.requires_grad or not weight.requires_grad:
        return False
    return isinstance(module, nn.Linear) or inputs.dim() == weight.dim()


class _InputFirst(torch.autograd.Function):
    """A layer whose backward returns only the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, module: nn.Module, keep: Callable[..., None]) -> Any:
        ctx.save_for_backward(inputs)
        ctx.module, ctx.keep = module, keep
        output = module.forward(inputs)
        # For inputs with more than two dimensions the output is a view, which could not be changed in place.
        return torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (inputs,) = ctx.saved_tensors
        ctx.keep(ctx.module, inputs, grads[0])
        return _gradients(ctx.module, inputs, grads[0], (True, False, False))[0], None, None


class _Weights(torch.autograd.Function):
    """Computes a layer's weight gradients in its backward, so that hooks on the weights see them."""

    @staticmethod
    def forward(ctx: Any, weight: Any, bias: Any, module: nn.Module, inputs: torch.Tensor, grad: torch.Tensor) -> Any:
        ctx.given = module, inputs, grad
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_grads: torch.Tensor) -> Any:
        module, inputs, grad = ctx.given
        _, weight, bias = _gradients(module, inputs, grad, (False, *ctx.needs_input_grad[:2]))
        return weight, bias, None, None, None


def _gradients(module: Any, inputs: torch.Tensor, grad: torch.Tensor, wanted: tuple[bool, bool, bool]) -> Any:
    """Return the gradients of a layer's input, weight and bias, each only if wanted."""
    if not isinstance(module, nn.Linear):
        sizes = None if module.bias is None else [len(module.bias)]
        return torch.ops.aten.convolution_backward(
            grad, inputs, module.weight, sizes, module.stride, module.padding, module.dilation, False,
            [0] * len(module.stride), module.groups, wanted,
        )  # fmt: skip
    rows = grad.reshape(-1, grad.shape[-1])
    return (
        grad @ module.weight if wanted[0] else None,
        rows.t() @ inputs.reshape(-1, inputs.shape[-1]) if wanted[1] else None,
        rows.sum(0) if wanted[2] else None,
    )
