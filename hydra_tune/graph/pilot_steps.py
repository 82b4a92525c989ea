"""Optimizer steps of a pilot run: each parameter steps on a copy, to measure its optimizer state and its seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from hydra_tune.core.alignment import aligned
from hydra_tune.core.clock import work_seconds
from hydra_tune.core.tensor_memory import TensorBytes

StateLayout = dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]]
"""Type: for each parameter, the dtype and shape of each tensor of its optimizer state."""
PilotOptimizer = Callable[[str, nn.Parameter], torch.optim.Optimizer | None]
"""Type: a function from a parameter and its name to its optimizer, or to None if the parameter is not trained."""


class PilotSteps:
    """Makes the pilot's optimizer steps, and collects the layout of every parameter's optimizer state."""

    def __init__(self, model: nn.Module, optimizer: PilotOptimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.state: StateLayout = {}
        self.repeated = False
        """True if a gradient came in parts, as with a reentrant checkpoint of a shared module."""
        self._arrived: set[int] = set()
        self.stepping = False
        """True while a parameter makes its step."""
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}

    @contextmanager
    def made(self, counter: TensorBytes | None, then: Callable[[float, float, int], None]) -> Iterator[None]:
        """Make each parameter's step, on a copy, as soon as its gradient is complete; active within the block.

        `then` gets the seconds of the step, the seconds of its preparation, which a real run does not need, and the
        peak of `counter` during the step.
        """

        self._arrived.clear()

        def on_gradient(parameter: nn.Parameter) -> None:
            began = work_seconds()
            self.repeated |= id(parameter) in self._arrived
            self._arrived.add(id(parameter))
            # The state is counted by itself; what the active mode counts is what a step takes for a moment.
            with _disable_current_modes():
                optimizer = self.prepared(parameter)
            ready, before, peak = work_seconds(), 0, 0
            if optimizer is not None:
                if counter is not None:
                    before, counter.peak = counter.peak, counter.live
                self.stepping = True
                optimizer.step()
                self.stepping = False
                if counter is not None:
                    peak, counter.peak = counter.peak, before
            parameter.grad = None
            then(work_seconds() - ready, ready - began, peak)

        trained = [p for p in self.model.parameters() if p.requires_grad]
        hooks = [p.register_post_accumulate_grad_hook(on_gradient) for p in trained]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def take_early(self) -> None:
        """Discard gradients that a backward inside the loss has left: others will be added to them."""
        early = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        self.repeated |= bool(early)
        for parameter in early:
            parameter.grad = None

    def prepared(self, parameter: nn.Parameter) -> torch.optim.Optimizer | None:
        """Return the optimizer of a copy of the parameter, with the state that its first step makes."""
        name = self._names[id(parameter)]
        copy = nn.Parameter(parameter.detach().clone())
        copy.grad = parameter.grad
        optimizer = self.optimizer(name, copy)
        if optimizer is None:
            self.state[name] = {}
            return None
        optimizer.step()
        self.state[name] = tensors_of(optimizer.state[copy])
        return optimizer

    def prepare_others(self) -> None:
        """Find the state of parameters that got no gradient in the pilot batch: another batch may give them one."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and name not in self.state:
                parameter.grad = torch.zeros_like(parameter)
                self.prepared(parameter)
                parameter.grad = None


@contextmanager
def gradients_aside(model: nn.Module) -> Iterator[None]:
    """Set waiting gradients aside for the duration of the block, so that the pilot's steps do not use them up."""
    pending = {parameter: parameter.grad for parameter in model.parameters()}
    model.zero_grad()
    try:
        yield
    finally:
        for parameter, gradient in pending.items():
            parameter.grad = gradient


def tensors_of(state: Mapping[str, Any]) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return dtype and shape of each tensor of an optimizer's state, without plain numbers and one-number tensors."""
    return {
        key: (value.dtype, tuple(value.shape))
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    }


def state_bytes(state: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> int:
    """Return the bytes of one parameter's optimizer state."""
    return sum(aligned(dtype.itemsize * torch.Size(shape).numel()) for dtype, shape in state.values())


def bytes_of(tree: Any) -> int:
    """Return the bytes of all tensors of a tree."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
