"""LSTM: reads a sequence or an image's rows and predicts at the end; in text, the next symbol each time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from optuna.distributions import CategoricalDistribution, IntDistribution
from torch import nn

from hydra_tune.search_spaces.dataset import Data
from hydra_tune.search_spaces.space import Param, Space
from hydra_tune.search_spaces.training import HUGE, dropout_param, training_params
from hydra_tune.search_spaces.transformer import Rows


class Recurrent(nn.Module):
    """One LSTM layer and dropout. A deep LSTM is several of these, so that a cut can pass between them."""

    def __init__(self, features: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, batch_first=True)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.dropout(self.lstm(x)[0])
        return states


class LastStep(nn.Module):
    """Selects the last step of a sequence."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, -1]


def space(data: Data) -> Space:
    """Return the search space: depth, width and training parameters."""
    return Space(
        (
            Param("depth", IntDistribution(1, 2), limits=(1, 100)),
            Param("hidden", CategoricalDistribution((64, 96, 128)), limits=(1, HUGE)),
            dropout_param(),
            *training_params(lr=(2e-3, 2e-2)),
        )
    )


def model(params: Mapping[str, Any], data: Data) -> nn.Module:
    """Return the network for one assignment."""
    hidden = params["hidden"]
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if data.kind == "tokens":
        layers["embed"] = nn.Embedding(data.outputs, hidden)
        features = hidden
    elif data.kind == "image":
        channels, _, width = data.input_shape
        layers["rows"] = Rows()
        features = channels * width
    else:
        features = data.input_shape[1]
    for i in range(params["depth"]):
        layers[f"layer_{i}"] = Recurrent(features if i == 0 else hidden, hidden, params["dropout"])
    if data.task != "language":
        layers["last"] = LastStep()
    layers["head"] = nn.Linear(hidden, data.outputs)
    return nn.Sequential(layers)
