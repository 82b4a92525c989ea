"""Multilayer perceptron for tables: embedded columns, and a small ensemble of members that share their layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from torch import nn

from hydra_tune.search_spaces.bagged import BaggedDropout, BaggedLinear, Members, MembersHead
from hydra_tune.search_spaces.dataset import Data
from hydra_tune.search_spaces.mlp import ACTIVATIONS
from hydra_tune.search_spaces.space import Param, Space
from hydra_tune.search_spaces.tabular import feature_params, features, layout_of, members_param, table_training_params
from hydra_tune.search_spaces.training import HUGE


def space(data: Data) -> Space:
    """Return the search space: depth, width, members and training parameters."""
    return Space(
        (
            Param("depth", IntDistribution(1, 3), limits=(1, 16)),
            Param("width", CategoricalDistribution((32, 64, 128, 256)), limits=(1, HUGE)),
            members_param(data),
            Param("activation", CategoricalDistribution(tuple(ACTIVATIONS))),
            Param("dropout", FloatDistribution(0.0, 0.5), limits=(0.0, 0.95)),
            *feature_params(data),
            *table_training_params(data, lr=(5e-4, 2e-2)),
        )
    )


def model(params: Mapping[str, Any], data: Data) -> nn.Module:
    """Return the perceptron for one assignment, for every fold."""
    layout = layout_of(data)
    first = features(params, layout)
    layers: OrderedDict[str, nn.Module] = OrderedDict(features=first)
    layers["members"] = Members(layout.folds, params["members"], first.features)
    width = first.features
    for i in range(params["depth"]):
        layers[f"linear_{i}"] = BaggedLinear(layout.folds, width, params["width"])
        layers[f"activation_{i}"] = ACTIVATIONS[params["activation"]]()
        layers[f"dropout_{i}"] = BaggedDropout(params["dropout"])
        width = params["width"]
    layers["head"] = MembersHead(layout.folds, params["members"], width, data.outputs)
    return nn.Sequential(layers)
