"""Multilayer perceptron: dense layers of chosen widths, for any inputs that are numbers.

Inputs of more than one dimension are flattened.
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

MAX_DEPTH = 16
"""Largest depth in overrides; by default a search stops at 4."""

ACTIVATIONS: Mapping[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}


class Layer(nn.Module):
    """A dense layer, its activation and dropout."""

    def __init__(self, inputs: int, width: int, activation: str, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, width)
        self.activation = ACTIVATIONS[activation]()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.dropout(self.activation(self.linear(x)))
        return outputs


def space(data: Data) -> Space:
    """Return the search space: depth, one width per layer, and training parameters."""
    width = IntDistribution(32, 256, step=32)
    return Space(
        (
            Param("depth", IntDistribution(1, 4), limits=(1, MAX_DEPTH)),
            *(
                Param(f"width_{i}", width, when=Above("depth", i) if i else None, limits=(1, HUGE))
                for i in range(MAX_DEPTH)
            ),
            Param("activation", CategoricalDistribution(tuple(ACTIVATIONS))),
            dropout_param(),
            *training_params(lr=(1e-3, 1e-2), optimizers=("adamw", "sgd")),
        )
    )


def model(params: Mapping[str, Any], data: Data) -> nn.Module:
    """Return the perceptron for one assignment."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    width = math.prod(data.input_shape)
    for i in range(params["depth"]):
        layers[f"layer_{i}"] = Layer(width, params[f"width_{i}"], params["activation"], params["dropout"])
        width = params[f"width_{i}"]
    layers["head"] = nn.Linear(width, data.outputs)
    return nn.Sequential(layers)
