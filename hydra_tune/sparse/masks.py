"""Which weights of a network survive: masks by magnitude, by chance or as given, and when they have settled.

A mask is the survivors' positions in the flattened weight, ascending, as int32. Each layer is pruned by itself, with a
least number of survivors: one mask for all layers together can leave a layer with none, and the network in two.
`EarlyBird` watches the magnitude masks of a network in dense training (You et al., arXiv 1909.11957): once they hardly
change from epoch to epoch, the network that they leave can be trained on its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hydra_tune.errors import CandidateError, nearest

Masks = dict[str, torch.Tensor]

_PRUNED = (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention)
"""Modules whose matrices and filters are pruned. A matrix that belongs to any other may be anything: a table of
positions, a token, a weight that the kernels want whole."""
_KEPT_DENSE = (nn.Embedding, nn.EmbeddingBag)
"""A weight that is tied to one of these is a table too."""


def prunable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that are pruned by default: trainable matrices and filters of linear layers, convolutions and
    attention."""

    def owned_by(kinds: tuple[type[nn.Module], ...]) -> set[int]:
        owners = [module for module in model.modules() if isinstance(module, kinds)]
        return {id(parameter) for module in owners for parameter in module.parameters(recurse=False)}

    chosen = owned_by(_PRUNED) - owned_by(_KEPT_DENSE)
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.dim() >= 2 and id(parameter) in chosen
    }


def survivors(size: int, sparsity: float, least: int) -> int:
    """How many of `size` weights are kept."""
    return min(size, max(least, round(size * (1.0 - sparsity))))


def by_magnitude(weight: torch.Tensor, keep: int) -> torch.Tensor:
    """The `keep` largest weights by absolute value; of equal ones the first."""
    order = torch.sort(weight.detach().abs().reshape(-1), descending=True, stable=True).indices
    return order[:keep].sort().values.to(torch.int32)


def by_chance(weight: torch.Tensor, keep: int, generator: torch.Generator) -> torch.Tensor:
    """Any `keep` weights: what a mask has to beat."""
    return torch.randperm(weight.numel(), generator=generator)[:keep].sort().values.to(torch.int32).to(weight.device)


def magnitude_masks(model: nn.Module, sparsity: float, least: int) -> Masks:
    """Each layer's mask by magnitude, as the weights are now."""
    weights = prunable(model)
    return {name: by_magnitude(w, survivors(w.numel(), sparsity, least)) for name, w in weights.items()}


def random_masks(model: nn.Module, sparsity: float, least: int, seed: int) -> Masks:
    """Each layer's mask by chance, from a seed."""
    generator = torch.Generator().manual_seed(seed)
    weights = prunable(model)
    return {name: by_chance(w, survivors(w.numel(), sparsity, least), generator) for name, w in weights.items()}


def given_masks(model: nn.Module, given: Mapping[str, torch.Tensor]) -> Masks:
    """The user's masks: for parameters by name, tensors of their shape that are nonzero where a weight survives."""
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
    """How unlike two masks of a layer are: 0 for equal ones, 1 where no weight survives in both.

    By their own number of survivors, not by the layer's size as the paper has it: at 95% and more, any two masks differ
    in less than a tenth of the layer.
    """
    kept = torch.zeros(size, dtype=torch.bool, device=one.device)
    kept[one.long()] = True
    common = int(kept[other.long()].sum())
    total = len(one) + len(other)
    return (total - 2 * common) / total


@dataclass
class EarlyBird:
    """The masks of the last epochs, and whether they have settled."""

    window: int = 3
    threshold: float = 0.03
    """Distance at which masks have settled. The paper's 0.1 is by the layer's size. By this measure, on digits at 90%,
    networks pruned at 0.1, in the sixth epoch, ended 0.3 points behind those pruned at 0.03, in the twelfth."""
    recent: list[Masks] = field(default_factory=list)

    def see(self, model: nn.Module, sparsity: float, least: int) -> float:
        """Look at the weights after an epoch; how far the masks of the last epochs are apart, at most."""
        weights = prunable(model)
        self.recent = [*self.recent, magnitude_masks(model, sparsity, least)][-self.window :]
        if len(self.recent) < self.window:
            return math.inf
        latest = self.recent[-1]
        sizes = {name: weight.numel() for name, weight in weights.items()}
        # Layers count by their survivors: a small one that flickers does not hold up the network.
        total = sum(len(mask) for mask in latest.values())
        return max(
            sum(distance(latest[name], earlier[name], sizes[name]) * len(latest[name]) for name in latest) / total
            for earlier in self.recent[:-1]
        )

    def state(self) -> dict[str, Any]:
        return {"recent": self.recent}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.recent = [dict(masks) for masks in state["recent"]]
