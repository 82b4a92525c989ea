"""GPT: a causal language model whose output layer shares the weights of its embedding."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hydra_tune.search_spaces.attention import Block, attention_params
from hydra_tune.search_spaces.dataset import Data
from hydra_tune.search_spaces.space import Space
from hydra_tune.search_spaces.training import training_params


class Embed(nn.Module):
    """A vector for each token plus one for its place; all blocks have one length."""

    def __init__(self, vocabulary: int, steps: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, dim)
        self.position = nn.Parameter(torch.randn(steps, dim) / math.sqrt(dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.dropout(self.token(tokens) + self.position)
        return embedded


def space(data: Data) -> Space:
    """Return the search space: depth, number and size of heads, and training parameters."""
    return Space(
        (
            *attention_params(depth=(1, 3), heads=(2, 4), head_dims=(8, 16)),
            *training_params(lr=(1e-3, 6e-3)),
        )
    )


def model(params: Mapping[str, Any], data: Data) -> nn.Module:
    """Return the language model for one assignment."""
    heads, head_dim, depth = params["heads"], params["head_dim"], params["depth"]
    embed = Embed(data.outputs, data.input_shape[0], heads * head_dim, params["dropout"])
    head = nn.Linear(heads * head_dim, data.outputs, bias=False)
    head.weight = embed.token.weight
    layers: OrderedDict[str, nn.Module] = OrderedDict(embed=embed)
    for i in range(depth):
        layers[f"block_{i}"] = Block(heads, head_dim, params["expansion"], params["dropout"], causal=True)
    layers["norm"] = nn.LayerNorm(heads * head_dim)
    layers["head"] = head
    network = nn.Sequential(layers)
    _initialise(network, std=1 / math.sqrt(heads * head_dim), depth=depth)
    return network


def _initialise(network: nn.Sequential, std: float, depth: int) -> None:
    """Initialise weights with variance 1 / width: torch's own embeddings, tied to the output, start with a huge loss.

    The sum that the 2 x depth layers of the blocks add to the residual stream starts with the variance of one layer, as
    in GPT-2.
    """
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            ends_branch = name.endswith((".merge", ".narrow"))
            nn.init.normal_(module.weight, std=std / math.sqrt(2 * depth) if ends_branch else std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
