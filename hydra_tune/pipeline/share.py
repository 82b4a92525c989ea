"""A device's share of a trial in stages: its parameters and buffers, the schedule and the random streams."""

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
        self.files = files
        model: nn.Module = kit.candidate.model
        state = put_together(files, self.held, kit.parts, kit.data)
        groups = [{k: v for k, v in group.items() if k != "params"} for group in state["optimizer"]["param_groups"]]
        self.schedule = Schedule(kit.parts, kit.candidate.scheduler, state["scheduler"], groups)
        self.parameters = kit.parameters(model, state, kit.parts, device)
        self.buffers = {name: each for name, each in model.named_buffers() if name in state["tensors"]}
        for name, buffer in self.buffers.items():
            buffer.data = state["tensors"][name].to(device).clone()
        self.random = RandomState.from_state(state["random"])
        self.kept: dict[str, torch.Tensor] | None = state["kept"]
        """The weights of the best epoch so far."""
        self.steps: int = state["position"]["steps"]
        self._extra = state["extra"]

    def everything(self) -> list[torch.Tensor]:
        """All tensors that stay."""
        return [*self.parameters.everything(), *self.buffers.values()]

    def step(self, factor: float) -> None:
        """The optimizer's step for the parameters here, with their gradients times `factor`."""
        self.parameters.step(self.schedule.options, factor)
        self.steps += 1
        if self.kit.candidate.schedule_every == "step":
            self.schedule.step()

    def end_epoch(self, loss: float) -> None:
        """The epoch was judged by this loss: step an epoch schedule."""
        if self.kit.candidate.schedule_every == "epoch":
            self.schedule.step(loss)

    def keep_weights(self) -> None:
        """Remember the weights as they are now."""
        self.kept = {name: tensor.detach().cpu().clone() for name, tensor in self._tensors().items()}

    def collect(self, position: Mapping[str, Any], history: list[dict[str, float]], random: Random) -> None:
        """Write this device's state to its files, for whoever puts the trial together."""
        if random is not None:
            self.random = as_state(random)
        groups = [dict(options) for options in self.schedule.options]
        state = {
            "tensors": self._tensors(),
            "gradients": self.parameters.gradients(),
            "optimizer": {"state": self.parameters.optimizer_state(), "param_groups": groups},
            "scheduler": self.schedule.state(),
            "random": self.random.state(),
            "position": dict(position),
            "history": history,
            "kept": self.kept,
            "extra": self._extra,
        }
        take_apart(state, self.held, self.kit.parts, self.files)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {**self.parameters.tensors(), **self.buffers}


def as_state(random: Random) -> RandomState:
    """A point in the random streams, from a state or a seed."""
    if isinstance(random, int):
        seed_everything(random)
        return RandomState.capture()
    assert random is not None
    return RandomState.from_state(random)
