"""Masks of the surviving weights: by magnitude, at random or as given; and when magnitude masks have settled.

A mask is the ascending int32 positions of the survivors in the flattened weight. Each layer is pruned by itself, with a
minimum number of survivors: one mask for all layers together can leave a layer empty and so disconnect the network.
`EarlyBird` watches the magnitude masks of a network in dense training (You et al., arXiv 1909.11957): once they hardly
change between epochs, the masked network can be trained on its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hydra_tune.core.errors import CandidateError, nearest
from hydra_tune.graph.layers import is_conv1d

Masks = dict[str, torch.Tensor]

_PRUNED = (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention)
"""Modules whose matrices and filters are pruned. Matrices of other modules may be anything: a table of positions, a
token, a weight that kernels need whole."""
_KEPT_DENSE = (nn.Embedding, nn.EmbeddingBag)
"""Modules whose weights are tables; weights tied to them are not pruned either."""


def prunable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights pruned by default: trainable matrices and filters of linear, convolution, attention."""

    def owned_by(owns: Callable[[nn.Module], bool]) -> set[int]:
        owners = filter(owns, model.modules())
        return {id(parameter) for module in owners for parameter in module.parameters(recurse=False)}

    chosen = owned_by(lambda module: isinstance(module, _PRUNED) or is_conv1d(module))
    chosen -= owned_by(lambda module: isinstance(module, _KEPT_DENSE))
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.dim() >= 2 and id(parameter) in chosen
    }


def survivors(size: int, sparsity: float, least: int) -> int:
    """Return the number of weights kept out of `size`."""
    return min(size, max(least, round(size * (1.0 - sparsity))))


def by_magnitude(weight: torch.Tensor, keep: int) -> torch.Tensor:
    """Return the mask of the `keep` largest weights by absolute value; ties go to the first."""
    order = torch.sort(weight.detach().abs().reshape(-1), descending=True, stable=True).indices
    return order[:keep].sort().values.to(torch.int32)


def by_chance(weight: torch.Tensor, keep: int, generator: torch.Generator) -> torch.Tensor:
    """Return a mask of `keep` random weights: the baseline for other masks."""
    return torch.randperm(weight.numel(), generator=generator)[:keep].sort().values.to(torch.int32).to(weight.device)


def magnitude_masks(model: nn.Module, sparsity: float, least: int) -> Masks:
    """Return each layer's mask by the current magnitudes."""
    weights = prunable(model)
    return {name: by_magnitude(w, survivors(w.numel(), sparsity, least)) for name, w in weights.items()}


def random_masks(model: nn.Module, sparsity: float, least: int, seed: int) -> Masks:
    """Return a random mask for each layer, from a seed."""
    generator = torch.Generator().manual_seed(seed)
    weights = prunable(model)
    return {name: by_chance(w, survivors(w.numel(), sparsity, least), generator) for name, w in weights.items()}


def given_masks(model: nn.Module, given: Mapping[str, torch.Tensor]) -> Masks:
    """Return the user's masks: per parameter name, a tensor of its shape that is nonzero where a weight survives."""
    parameters = dict(model.named_parameters())
    masks: Masks = {}
    for name, mask in given.items():
        if name not in parameters:
            raise CandidateError(f"the mask names {name!r}, which is no parameter", nearest(name, parameters))
        weight = parameters[name]
        if mask.shape != weight.shape:
            raise CandidateError(
                f"the mask of {name!r} has the shape {tuple(mask.shape)}", f"give one of shape {tuple(weight.shape)}"
            )
        index = mask.reshape(-1).nonzero().reshape(-1)
        if not len(index):
            raise CandidateError(f"the mask of {name!r} leaves nothing of it", "keep at least one weight of each layer")
        masks[name] = index.to(torch.int32).to(weight.device)
    return masks


def distance(one: torch.Tensor, other: torch.Tensor, size: int) -> float:
    """Return the distance of two masks of a layer: 0 if equal, 1 if no weight survives in both.

    Relative to the number of survivors, not to the layer's size as in the paper: at 95% sparsity and more, any two
    masks differ in less than a tenth of the layer.
    """
    kept = torch.zeros(size, dtype=torch.bool, device=one.device)
    kept[one.long()] = True
    common = int(kept[other.long()].sum())
    total = len(one) + len(other)
    return (total - 2 * common) / total


@dataclass
class EarlyBird:
    """The masks of the last epochs, and their distance."""

    window: int = 3
    threshold: float = 0.03
    """Distance at which masks have settled. The paper's 0.1 is relative to the layer's size. With this measure, on
    digits at 90%, networks pruned at 0.1, in the sixth epoch, ended 0.3 points behind those pruned at 0.03, in the
    twelfth."""
    recent: list[Masks] = field(default_factory=list)

    def see(self, model: nn.Module, sparsity: float, least: int) -> float:
        """Add the masks after an epoch; return the largest distance of the newest masks to earlier ones."""
        weights = prunable(model)
        self.recent = [*self.recent, magnitude_masks(model, sparsity, least)][-self.window :]
        if len(self.recent) < self.window:
            return math.inf
        latest = self.recent[-1]
        sizes = {name: weight.numel() for name, weight in weights.items()}
        # Layers count by their survivors, so an unstable small layer does not delay pruning.
        total = sum(len(mask) for mask in latest.values())
        return max(
            sum(distance(latest[name], earlier[name], sizes[name]) * len(latest[name]) for name in latest) / total
            for earlier in self.recent[:-1]
        )

    def state(self) -> dict[str, Any]:
        return {"recent": self.recent}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.recent = [dict(masks) for masks in state["recent"]]
