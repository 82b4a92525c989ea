"""Residual convolutional network with batch normalisation, for images of any size and number of channels.

Each stage after the first halves the image and doubles the channels.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from optuna.distributions import CategoricalDistribution, IntDistribution
from torch import nn

from hydra_tune.search_spaces.dataset import Data
from hydra_tune.search_spaces.space import Above, Param, Space
from hydra_tune.search_spaces.training import HUGE, dropout_param, training_params


class Stem(nn.Sequential):
    """The first convolution, from the image's channels to the network's."""

    def __init__(self, inputs: int, channels: int) -> None:
        super().__init__(
            OrderedDict(
                conv=nn.Conv2d(inputs, channels, 3, padding=1, bias=False),
                norm=nn.BatchNorm2d(channels),
                relu=nn.ReLU(),
            )
        )


class Block(nn.Module):
    """Two convolutions with a residual connection, through a 1 x 1 convolution if the shape changes."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv_0 = nn.Conv2d(inputs, channels, 3, stride=stride, padding=1, bias=False)
        self.norm_0 = nn.BatchNorm2d(channels)
        self.conv_1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        same = inputs == channels and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, channels, 1, stride=stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.relu(self.norm_0(self.conv_0(x)))
        inner = self.norm_1(self.conv_1(inner))
        outputs: torch.Tensor = self.relu(inner + self.shortcut(x))
        return outputs


def space(data: Data) -> Space:
    """Return the search space: stages, blocks in each stage, channels and training parameters."""
    _, height, width = data.input_shape
    # Each stage after the first halves the image. Down to 2 x 2: batch-norm cannot train on one row of 1 x 1.
    most = max(1, math.floor(math.log2(min(height, width))))
    blocks = IntDistribution(1, 2)
    return Space(
        (
            Param("channels", CategoricalDistribution((8, 16, 32)), limits=(1, HUGE)),
            Param("stages", IntDistribution(1, min(3, most)), limits=(1, most)),
            *(
                Param(f"blocks_{i}", blocks, when=Above("stages", i) if i else None, limits=(1, 100))
                for i in range(most)
            ),
            dropout_param(),
            *training_params(lr=(1e-3, 1e-2), optimizers=("adamw", "sgd")),
        )
    )


def model(params: Mapping[str, Any], data: Data) -> nn.Module:
    """Return the network for one assignment."""
    channels = params["channels"]
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=Stem(data.input_shape[0], channels))
    inputs = channels
    for stage in range(params["stages"]):
        channels = params["channels"] * 2**stage
        for block in range(params[f"blocks_{stage}"]):
            halves = stage > 0 and block == 0
            layers[f"stage_{stage}_block_{block}"] = Block(inputs, channels, stride=2 if halves else 1)
            inputs = channels
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["dropout"] = nn.Dropout(params["dropout"])
    layers["head"] = nn.Linear(channels, data.outputs)
    return nn.Sequential(layers)
