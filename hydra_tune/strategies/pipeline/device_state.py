"""A device's state of a pipelined trial: its parameters and buffers, the schedule and the random streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hydra_tune.core.random_state import RandomState
from hydra_tune.core.seeds import seed_everything
from hydra_tune.engine.sealed import Sealed
from hydra_tune.spill.store import SpillFiles
from hydra_tune.strategies.pipeline.kit import PipelineKit
from hydra_tune.strategies.pipeline.staged import Random
from hydra_tune.strategies.shard.exchange import put_together, take_apart
from hydra_tune.strategies.shard.optimizers import Schedule


class DeviceState:
    """One device's part of the training state, loaded from its files."""

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
        """Weights of the best epoch so far."""
        self.steps: int = state["position"]["steps"]
        self._extra = state["extra"]

    def everything(self) -> list[torch.Tensor]:
        """Return all tensors that stay on the device."""
        return [*self.parameters.everything(), *self.buffers.values()]

    def step(self, factor: float) -> None:
        """Run the optimizer's step for the parameters on this device, with gradients scaled by `factor`."""
        self.parameters.step(self.schedule.options, factor)
        self.steps += 1
        if self.kit.candidate.schedule_every == "step":
            self.schedule.step()

    def end_epoch(self, loss: float) -> None:
        """Advance a per-epoch schedule, after an evaluation with this loss."""
        if self.kit.candidate.schedule_every == "epoch":
            self.schedule.step(loss)

    def keep_weights(self) -> None:
        """Keep a copy of the current weights."""
        self.kept = {name: tensor.detach().cpu().clone() for name, tensor in self._tensors().items()}

    def collect(self, position: Mapping[str, Any], history: list[dict[str, float]], random: Random) -> None:
        """Write this device's state to its files, for the builder."""
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
    """Return the random state of a sealed state or a seed."""
    if isinstance(random, int):
        seed_everything(random)
        return RandomState.capture()
    assert random is not None
    return RandomState.from_state(random.open())


def as_random(state: RandomState) -> Random:
    """Seal a random state, for another worker to continue from; the inverse of `as_state`."""
    return Sealed.of(state.state())
