"""Evaluation of the merged model: weights scaled for use, batch-norm statistics recomputed."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hydra_tune.core.moving import set_data
from hydra_tune.core.random_state import RandomState
from hydra_tune.core.trees import call_model, move
from hydra_tune.strategies.subnets.deal import in_use
from hydra_tune.strategies.subnets.phase import RoundsKit, State
from hydra_tune.training.batches import Batches
from hydra_tune.training.candidate import Dataset
from hydra_tune.training.loop import Training

STATISTICS_BATCHES = 64
"""Maximum number of batches for the statistics, spread over the epoch."""


def usable_model(kit: RoundsKit, tensors: Mapping[str, torch.Tensor], device: torch.device) -> nn.Module:
    """Return the whole model with these weights."""
    model = copy.deepcopy(kit.candidate.model)
    for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
        set_data(tensor, tensors[name].detach().to(device, copy=True))
    return model


def judged(
    kit: RoundsKit, state: State, device: torch.device, statistics: dict[str, torch.Tensor] | None = None
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return the metrics of the model in use, and its given or recomputed batch-norm statistics.

    One subnet is the whole model and keeps its own statistics; those of several saw only parts of their inputs.
    """
    tensors = in_use(kit.structure, kit.subnets, state["tensors"]) | (statistics or {})
    model = usable_model(kit, tensors, device)
    if statistics is None:
        statistics = recompute_statistics(kit, model, device, kit.train)[0] if kit.subnets > 1 else {}
    data = kit.valid if kit.pinned else kit.train
    at = Training(replace(kit.candidate, model=model), data, kit.valid, kit.seed, device)
    at.steps = state["position"]["steps"]
    at.draw_from(RandomState.from_state(state["random"][0]))
    return at.evaluate(), statistics


@torch.no_grad()
def recompute_statistics(
    kit: RoundsKit, model: nn.Module, device: torch.device, data: Dataset
) -> tuple[dict[str, torch.Tensor], int]:
    """Return the whole model's batch-norm statistics, means over batches of `data`, and the number of batches."""
    norms = {n: m for n, m in model.named_modules() if isinstance(m, _BatchNorm) and m.running_mean is not None}
    if not norms:
        return {}, 0
    momenta = {name: norm.momentum for name, norm in norms.items()}
    model.eval()
    for norm in norms.values():
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean over batches
        norm.train()
    batches = Batches(kit.candidate, data, training=True, seed=kit.seed)
    count = min(STATISTICS_BATCHES, len(batches))
    for i in range(count):
        position = i * len(batches) // count
        if batches.rows_at(position) > 1:
            call_model(model, move(batches.fetch(0, position), device)[0])
    model.eval()
    found: dict[str, Any] = {}
    for name, norm in norms.items():
        norm.momentum = momenta[name]
        found |= {f"{name}.{own}": value.detach().cpu() for own, value in norm.named_buffers(recurse=False)}
    return found, count


def mean_statistics(parts: Sequence[tuple[dict[str, torch.Tensor], int]]) -> dict[str, torch.Tensor]:
    """Return the combined statistics of several partitions, as if all their batches had been seen."""
    total = sum(count for _, count in parts)
    first = parts[0][0]
    return {
        name: sum((each[name] * (count / total) for each, count in parts), torch.zeros_like(value))
        if value.is_floating_point() else sum((each[name] for each, _ in parts), torch.zeros_like(value))
        for name, value in first.items()
    }  # fmt: skip
