"""A device's share of a pipelined trial's state: parameters and buffers, optimizer, schedule and random streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hydra_tune.engine.spill import SpillFiles
from hydra_tune.pipeline.kit import PipelineKit, Random
from hydra_tune.seeds import RandomState, seed_everything
from hydra_tune.shards.exchange import put_together, take_apart
from hydra_tune.shards.optimizers import Schedule


class Share:
    """What of a trial one device trains, taken up from its files."""

    def __init__(self, kit: PipelineKit, index: int, device: torch.device, files: SpillFiles) -> None:
        self.kit = kit
        self.held = kit.held[index]
        self.device = device
        self.files = files
        self.model: nn.Module = kit.candidate.model
        self.kept: dict[str, torch.Tensor] | None = None
        """The weights of the best epoch so far."""
        self.steps = 0
        self._restore(put_together(files, self.held, kit.parts, kit.data))

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters here, by name."""
        return {name: each for name, each in self.model.named_parameters() if name in self._names}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers."""
        return {**self.parameters(), **{n: each for n, each in self.model.named_buffers() if n in self._names}}

    def everything(self) -> list[torch.Tensor]:
        """The same with what the optimizer keeps."""
        kept = [value for state in self.optimizer.optimizer.state.values() for value in state.values()]
        return [*self.tensors().values(), *(value for value in kept if isinstance(value, torch.Tensor))]

    def norms(self) -> dict[str, float]:
        """The norm of each gradient, for clipping by the norm of all."""
        named = self.parameters()
        return {n: float(torch.linalg.vector_norm(p.grad)) for n, p in named.items() if p.grad is not None}

    def step(self, factor: float) -> None:
        """The optimizer's step for the parameters here, with their gradients times `factor`."""
        if factor != 1.0:
            for parameter in self.parameters().values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        self.optimizer.update(self.schedule.options)
        self.optimizer.optimizer.step()
        self.optimizer.optimizer.zero_grad()
        self.steps += 1
        if self.kit.candidate.schedule_every == "step":
            self.schedule.step()

    def end_epoch(self, loss: float) -> None:
        """The epoch was judged by this loss: step an epoch schedule."""
        if self.kit.candidate.schedule_every == "epoch":
            self.schedule.step(loss)

    def keep_weights(self) -> None:
        """Remember the weights as they are now."""
        self.kept = {name: tensor.detach().cpu().clone() for name, tensor in self.tensors().items()}

    def collect(self, position: Mapping[str, Any], history: list[dict[str, float]], random: Random) -> None:
        """Write this device's state to its files, for whoever puts the trial together."""
        if random is not None:
            self.random = as_state(random)
        state = {
            "tensors": self.tensors(),
            "gradients": {
                n: p.grad for n, p in self.parameters().items() if p.grad is not None
            },
            "optimizer": self._optimizer_state(),
            "scheduler": self.schedule.state(),
            "random": self.random.state(),
            "position": dict(position),
            "history": history,
            "kept": self.kept,
            "extra": self._extra,
        }  # fmt: skip
        take_apart(state, self.held, self.kit.parts, self.files)

    def _restore(self, state: dict[str, Any]) -> None:
        """Take up a state that `take_apart` wrote."""
        parts = self.kit.parts
        own = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        self._names = self.held.names
        for name in self._names:
            own[name].data = state["tensors"][name].to(self.device).clone()
        parameters = self.parameters()
        for name, gradient in state["gradients"].items():
            parameters[name].grad = gradient.to(self.device)
        groups = [{k: v for k, v in group.items() if k != "params"} for group in state["optimizer"]["param_groups"]]
        self.schedule = Schedule(parts, self.kit.candidate.scheduler, state["scheduler"], groups)
        self.optimizer = parts.for_parameters(parameters, self.schedule.options)
        for index, kept in state["optimizer"]["state"].items():
            self.optimizer.optimizer.state[parameters[parts.order[index]]] = {
                key: value.to(self.device) if isinstance(value, torch.Tensor) and value.dim() else value
                for key, value in kept.items()
            }
        self.random = RandomState.from_state(state["random"])
        self.kept = state["kept"]
        self.steps = state["position"]["steps"]
        self._extra = state["extra"]

    def _optimizer_state(self) -> dict[str, Any]:
        order = {name: index for index, name in enumerate(self.kit.parts.order)}
        named = self.parameters()
        state = self.optimizer.optimizer.state
        kept = {order[name]: dict(state[p]) for name, p in named.items() if name in order and state.get(p)}
        return {"state": kept, "param_groups": [dict(options) for options in self.schedule.options]}


def as_state(random: Random) -> RandomState:
    """A point in the random streams, from a state or a seed."""
    if isinstance(random, int):
        seed_everything(random)
        return RandomState.capture()
    assert random is not None
    return RandomState.from_state(random)
