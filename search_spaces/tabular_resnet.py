"""Residual network for tables: residual blocks of normalisation and two dense layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from torch import nn

from hydra_tune.search_spaces.bagged import BaggedDropout, BaggedLinear, BaggedNorm, Members, MembersHead
from hydra_tune.search_spaces.dataset import Data
from hydra_tune.search_spaces.space import Param, Space
from hydra_tune.search_spaces.tabular import feature_params, features, layout_of, members_param, table_training_params
from hydra_tune.search_spaces.training import HUGE


class Block(nn.Module):
    """Residual block: normalise, widen, drop out, narrow, add."""

    def __init__(self, folds: int, width: int, expansion: float, dropout: float) -> None:
        super().__init__()
        inner = max(1, round(width * expansion))
        self.norm = BaggedNorm(folds, width, middle=2)
        self.widen = BaggedLinear(folds, width, inner)
        self.relu = nn.ReLU()
        self.dropout = BaggedDropout(dropout)
        self.narrow = BaggedLinear(folds, inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.narrow(self.dropout(self.relu(self.widen(self.norm(x)))))
        return x + inner


def space(data: Data) -> Space:
    """Return the search space: blocks, width, expansion, members and training parameters."""
    return Space(
        (
            Param("blocks", IntDistribution(1, 4), limits=(1, 64)),
            Param("width", CategoricalDistribution((32, 64, 128)), limits=(1, HUGE)),
            Param("expansion", CategoricalDistribution((1.0, 2.0)), limits=(0.1, 16.0)),
            members_param(data),
            Param("dropout", FloatDistribution(0.0, 0.5), limits=(0.0, 0.95)),
            *feature_params(data),
            *table_training_params(data, lr=(3e-4, 1e-2)),
        )
    )


def model(params: Mapping[str, Any], data: Data) -> nn.Module:
    """Return the network for one assignment, for every fold."""
    layout = layout_of(data)
    first, width = features(params, layout), params["width"]
    layers: OrderedDict[str, nn.Module] = OrderedDict(features=first)
    layers["members"] = Members(layout.folds, params["members"], first.features)
    layers["stem"] = BaggedLinear(layout.folds, first.features, width)
    for i in range(params["blocks"]):
        layers[f"block_{i}"] = Block(layout.folds, width, params["expansion"], params["dropout"])
    layers["norm"] = BaggedNorm(layout.folds, width, middle=2)
    layers["relu"] = nn.ReLU()
    layers["head"] = MembersHead(layout.folds, params["members"], width, data.outputs)
    return nn.Sequential(layers)
