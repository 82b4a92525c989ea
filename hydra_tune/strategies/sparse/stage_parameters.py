"""A device's parameters of a pruned network in stages, with compressed state.

Each micro-batch's backward produces dense gradients one by one; the survivors' parts add up until the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hydra_tune.strategies.pipeline.parameters import Parameters
from hydra_tune.strategies.shard.optimizers import Options
from hydra_tune.strategies.shard.plan import index_of, master_of
from hydra_tune.strategies.sparse.blocks import block_optimizer, block_tensors, stored_weights
from hydra_tune.strategies.sparse.state import CompressedState


class Compressed(Parameters):
    """Parameters whose pruned ones have gradients and optimizer state for their survivors only."""

    def _take_up(self, state: Mapping[str, Any]) -> None:
        tensors = state["tensors"]
        trained = {n: p for n, p in self.named.items() if p.requires_grad and n in self.parts.group_of}
        masks = {name: tensors[index_of(name)].clone() for name in trained if index_of(name) in tensors}
        options = [{k: v for k, v in group.items() if k != "params"} for group in state["optimizer"]["param_groups"]]
        mixed = any(master_of(name) in tensors for name in trained)
        self.weights = CompressedState(trained, masks, self.parts, options, mixed=mixed)
        self.weights.restore(stored_weights(state, self.parts, set(trained)))

    def tensors(self) -> dict[str, torch.Tensor]:
        return {**{name: p.data for name, p in self.named.items()}, **block_tensors(self.weights)}

    def everything(self) -> list[torch.Tensor]:
        return [*self.named.values(), *self.weights.tensors()]

    def norms(self) -> dict[str, float]:
        return self.weights.norms()

    def step(self, options: Sequence[Options], factor: float) -> None:
        self.weights.step_by(options, factor)

    def gradients(self) -> dict[str, torch.Tensor]:
        return {}  # training pauses only between steps

    def optimizer_state(self) -> dict[int, dict[str, Any]]:
        return block_optimizer(self.weights, self.parts)
