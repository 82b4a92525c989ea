"""Transformer encoder for classification and regression.

A token is a feature of a table, a row of an image, or a step of a sequence.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hydra_tune.search_spaces.attention import Block, attention_params
from hydra_tune.search_spaces.dataset import Data
from hydra_tune.search_spaces.space import Space
from hydra_tune.search_spaces.training import training_params


class EmbedFeatures(nn.Module):
    """A token for each feature: its value times a learned vector, plus another."""

    def __init__(self, features: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, dim) * 0.5)
        self.bias = nn.Parameter(torch.randn(features, dim) * 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(-1) * self.weight + self.bias


class EmbedSteps(nn.Module):
    """A token for each step: a dense layer of its numbers, plus a learned vector for its position."""

    def __init__(self, steps: int, features: int, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, dim)
        self.position = nn.Parameter(torch.randn(steps, dim) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens: torch.Tensor = self.linear(x)
        return tokens + self.position


class Rows(nn.Module):
    """Turns the rows of an image into steps: (batch, c, height, width) to (batch, height, c * width)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).flatten(2)


class MeanOverSteps(nn.Module):
    """Averages the steps to one vector for each row of the batch."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim=1)


def space(data: Data) -> Space:
    """Return the search space: depth, number and size of heads, and training parameters."""
    return Space(
        (
            *attention_params(depth=(1, 3), heads=(2, 4), head_dims=(8, 16)),
            *training_params(lr=(1e-3, 5e-3)),
        )
    )


def model(params: Mapping[str, Any], data: Data) -> nn.Module:
    """Return the encoder for one assignment."""
    heads, head_dim = params["heads"], params["head_dim"]
    dim = heads * head_dim
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if data.kind == "features":
        layers["embed"] = EmbedFeatures(data.input_shape[0], dim)
    elif data.kind == "image":
        channels, height, width = data.input_shape
        layers["rows"] = Rows()
        layers["embed"] = EmbedSteps(height, channels * width, dim)
    else:
        layers["embed"] = EmbedSteps(data.input_shape[0], data.input_shape[1], dim)
    for i in range(params["depth"]):
        layers[f"block_{i}"] = Block(heads, head_dim, params["expansion"], params["dropout"])
    layers["pool"] = MeanOverSteps()
    layers["norm"] = nn.LayerNorm(dim)
    layers["head"] = nn.Linear(dim, data.outputs)
    return nn.Sequential(layers)
