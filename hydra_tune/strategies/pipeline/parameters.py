"""A device's parameters in a pipelined trial, and their optimizer.

`Dense` has whole parameters and a real optimizer over them, as a plain loop has. Pruned networks store less
(`sparse/stage_parameters.py`). The kit names the class; the rest of a share is the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hydra_tune.core.moving import set_data
from hydra_tune.strategies.shard.optimizers import OptimizerParts, Options, moved


class Parameters(ABC):
    """The parameters on this device, loaded from a state in blocks (`shard.exchange.put_together`)."""

    def __init__(self, model: nn.Module, state: Mapping[str, Any], parts: OptimizerParts, device: torch.device) -> None:
        self.parts = parts
        self.device = device
        tensors = state["tensors"]
        self.named = {name: parameter for name, parameter in model.named_parameters() if name in tensors}
        for name, parameter in self.named.items():
            set_data(parameter, tensors[name].to(device, copy=True))
        self._take_up(state)

    @abstractmethod
    def _take_up(self, state: Mapping[str, Any]) -> None:
        """Load the rest of the state; the weights are loaded already."""

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights, by their names in the blocks."""

    @abstractmethod
    def everything(self) -> list[torch.Tensor]:
        """Return all tensors that stay on the device: weights, permanent gradients and optimizer state."""

    @abstractmethod
    def norms(self) -> dict[str, float]:
        """Return the norm of each gradient, for clipping by the total norm."""

    @abstractmethod
    def step(self, options: Sequence[Options], factor: float) -> None:
        """Run the optimizer's step, with all gradients scaled by `factor`."""

    @abstractmethod
    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients that wait for a step."""

    @abstractmethod
    def optimizer_state(self) -> dict[int, dict[str, Any]]:
        """Return the optimizer's state, by the parameters' numbers in the optimizer of the whole model."""


class Dense(Parameters):
    """Whole parameters, and a real optimizer over them."""

    def _take_up(self, state: Mapping[str, Any]) -> None:
        for name, gradient in state["gradients"].items():
            self.named[name].grad = gradient.to(self.device)
        options = [{k: v for k, v in group.items() if k != "params"} for group in state["optimizer"]["param_groups"]]
        self.optimizer = self.parts.for_parameters(self.named, options)
        for index, kept in state["optimizer"]["state"].items():
            self.optimizer.optimizer.state[self.named[self.parts.order[index]]] = moved(kept, self.device)

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.named)

    def everything(self) -> list[torch.Tensor]:
        kept = [value for state in self.optimizer.optimizer.state.values() for value in state.values()]
        return [*self.named.values(), *(value for value in kept if isinstance(value, torch.Tensor))]

    def norms(self) -> dict[str, float]:
        return {n: float(torch.linalg.vector_norm(p.grad)) for n, p in self.named.items() if p.grad is not None}

    def step(self, options: Sequence[Options], factor: float) -> None:
        if factor != 1.0:
            for parameter in self.named.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        self.optimizer.update(options)
        self.optimizer.optimizer.step()
        self.optimizer.optimizer.zero_grad()

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad for name, p in self.named.items() if p.grad is not None}

    def optimizer_state(self) -> dict[int, dict[str, Any]]:
        order = {name: index for index, name in enumerate(self.parts.order)}
        state = self.optimizer.optimizer.state
        return {order[name]: dict(state[p]) for name, p in self.named.items() if name in order and state.get(p)}
