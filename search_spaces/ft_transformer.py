"""FT-Transformer: a token for each column, of numbers or categories, and attention among them (arXiv 2106.11959)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from torch import nn
from torch.nn import functional

from hydra_tune.search_spaces.bagged import (
    BaggedDropout,
    BaggedLinear,
    BaggedNorm,
    CategoryEmbeddings,
    MembersHead,
    TextEmbedding,
)
from hydra_tune.search_spaces.dataset import Data
from hydra_tune.search_spaces.space import Param, Space
from hydra_tune.search_spaces.table import TableLayout
from hydra_tune.search_spaces.tabular import layout_of, scaling_param, table_training_params

HEADS = 4


class Tokens(nn.Module):
    """A vector for each column of a row, and one more to read the answer from: (folds, rows, 1 + columns, width)."""

    def __init__(self, layout: TableLayout, width: int, quantiles: bool) -> None:
        super().__init__()
        self.layout, self.quantiles = layout, quantiles
        bound = width**-0.5
        self.weight = nn.Parameter(torch.empty(layout.folds, 1, layout.numbers, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(layout.folds, 1, layout.numbers, width).uniform_(-bound, bound))
        self.answer = nn.Parameter(torch.empty(layout.folds, 1, 1, width).uniform_(-bound, bound))
        if layout.categories:
            self.categories = CategoryEmbeddings(layout.folds, layout.categories, width)
        self.texts = nn.ModuleList(TextEmbedding(layout.folds, words, width) for words, _ in layout.texts)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = rows.transpose(0, 1)
        numbers = x[..., self.layout.scaled(self.quantiles)].unsqueeze(-1) * self.weight + self.bias
        parts = [self.answer.expand(-1, x.shape[1], -1, -1), numbers]
        if self.layout.categories:
            parts.append(self.categories(x[..., self.layout.codes()]))
        for embed, where in zip(self.texts, self.layout.words(), strict=True):
            parts.append(embed(x[..., where]).unsqueeze(2))
        return torch.cat(parts, dim=2)


class Block(nn.Module):
    """Attention among a row's tokens, then a dense layer for each; both with residual connections."""

    def __init__(self, folds: int, width: int, dropout: float) -> None:
        super().__init__()
        self.before_attention = BaggedNorm(folds, width, middle=2)
        self.split = BaggedLinear(folds, width, 3 * width)
        self.join = BaggedLinear(folds, width, width)
        self.before_dense = BaggedNorm(folds, width, middle=2)
        self.widen = BaggedLinear(folds, width, 2 * width)
        self.narrow = BaggedLinear(folds, 2 * width, width)
        self.gelu = nn.GELU()
        self.dropout = BaggedDropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.join(_attend(self.split(self.before_attention(x)))))
        fed: torch.Tensor = self.narrow(self.dropout(self.gelu(self.widen(self.before_dense(x)))))
        return x + fed


def _attend(split: torch.Tensor) -> torch.Tensor:
    """Attention of `HEADS` heads, from queries, keys and values side by side: (folds, rows, tokens, 3 * width)."""
    heads = torch.unflatten(split.flatten(0, 1), -1, (3, HEADS, split.shape[-1] // (3 * HEADS)))
    query, key, value = heads.permute(2, 0, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(query, key, value)
    return torch.unflatten(mixed.transpose(1, 2).flatten(-2), 0, split.shape[:2])


class Answer(nn.Module):
    """Returns the first token, normalised, in the shape for the members' head: (folds, 1, rows, width)."""

    def __init__(self, folds: int, width: int) -> None:
        super().__init__()
        self.norm = BaggedNorm(folds, width, middle=1)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = self.relu(self.norm(x[:, :, 0]))
        return first.unsqueeze(1)


def space(data: Data) -> Space:
    """Return the search space: blocks, width and training parameters."""
    return Space(
        (
            Param("blocks", IntDistribution(1, 3), limits=(1, 24)),
            Param("head_width", CategoricalDistribution((4, 8, 16)), limits=(1, 256)),
            Param("dropout", FloatDistribution(0.0, 0.3), limits=(0.0, 0.95)),
            scaling_param(layout_of(data)),
            *table_training_params(data, lr=(3e-4, 5e-3), decay=(1e-5, 0.3)),
        )
    )


def model(params: Mapping[str, Any], data: Data) -> nn.Module:
    """Return the transformer for one assignment, for every fold."""
    layout, width = layout_of(data), HEADS * params["head_width"]
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["tokens"] = Tokens(layout, width, params["scaling"] == "quantile")
    for i in range(params["blocks"]):
        layers[f"block_{i}"] = Block(layout.folds, width, params["dropout"])
    layers["answer"] = Answer(layout.folds, width)
    layers["head"] = MembersHead(layout.folds, 1, width, data.outputs)
    return nn.Sequential(layers)
