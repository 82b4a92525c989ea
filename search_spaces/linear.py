"""Linear model of a table: the baseline that every other model has to beat.

A category's vector has one number for each output, which is a weight for each of its one-hot columns; so has a word's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hydra_tune.search_spaces.bagged import BaggedLinear, CategoryEmbeddings, TextEmbedding
from hydra_tune.search_spaces.dataset import Data
from hydra_tune.search_spaces.space import Space
from hydra_tune.search_spaces.table import TableLayout
from hydra_tune.search_spaces.tabular import layout_of, scaling_param, table_training_params


class Linear(nn.Module):
    """A weighted sum of the columns, for every fold; starts at zero."""

    def __init__(self, layout: TableLayout, outputs: int, quantiles: bool) -> None:
        super().__init__()
        self.layout, self.quantiles = layout, quantiles
        self.numbers = BaggedLinear(layout.folds, layout.numbers, outputs)
        if layout.categories:
            self.categories = CategoryEmbeddings(layout.folds, layout.categories, outputs)
        self.texts = nn.ModuleList(TextEmbedding(layout.folds, words, outputs) for words, _ in layout.texts)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.zero_()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = rows.transpose(0, 1)
        total: torch.Tensor = self.numbers(x[..., self.layout.scaled(self.quantiles)])
        if self.layout.categories:
            total = total + self.categories(x[..., self.layout.codes()]).sum(dim=-2)
        for embed, where in zip(self.texts, self.layout.words(), strict=True):
            total = total + embed(x[..., where])
        return total.transpose(0, 1).unsqueeze(2)


def space(data: Data) -> Space:
    """Return the search space: scaling of numbers and training parameters."""
    return Space((scaling_param(layout_of(data)), *table_training_params(data, lr=(3e-3, 1e-1), decay=(1e-6, 1e-1))))


def model(params: Mapping[str, Any], data: Data) -> nn.Module:
    """Return the linear model for one assignment, for every fold."""
    return Linear(layout_of(data), data.outputs, params["scaling"] == "quantile")
