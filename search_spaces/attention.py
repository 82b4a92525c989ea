"""The block of the transformer and GPT families: attention, then a feed-forward layer."""

from __future__ import annotations

from collections import OrderedDict

import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from torch import nn
from torch.nn import functional

from hydra_tune.search_spaces.space import Param


class Attention(nn.Module):
    """Multi-head self-attention; with `causal`, no position sees a later one.

    Attention weights are not dropped out: `scaled_dot_product_attention` takes the rate as a number, which a captured
    graph would keep in evaluation too.
    """

    def __init__(self, heads: int, head_dim: int, causal: bool) -> None:
        super().__init__()
        dim = heads * head_dim
        self.split = (3, heads, head_dim)
        self.causal = causal
        self.project = nn.Linear(dim, 3 * dim)
        self.merge = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # (batch, steps, 3 * dim) -> (3, batch, heads, steps, head_dim)
        mixed = self.project(x).unflatten(-1, self.split).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(mixed[0], mixed[1], mixed[2], is_causal=self.causal)
        merged: torch.Tensor = self.merge(seen.transpose(1, 2).flatten(2))
        return merged

    def heads_in(self) -> tuple[int, dict[str, tuple[int, int, int]]]:
        """Return the number of heads and their layout in each parameter, for subnets with some of the heads."""
        parts, heads, size = self.split
        return heads, {
            "project.weight": (0, parts, size),
            "project.bias": (0, parts, size),
            "merge.weight": (1, 1, size),
        }

    def keep_heads(self, count: int) -> None:
        """Set the number of heads that the parameters now hold."""
        self.split = (self.split[0], count, self.split[2])


class Block(nn.Module):
    """Attention, then a feed-forward layer; each reads a normalised input and adds to it."""

    def __init__(self, heads: int, head_dim: int, expansion: int, dropout: float, causal: bool = False) -> None:
        super().__init__()
        dim = heads * head_dim
        self.norm_attention = nn.LayerNorm(dim)
        self.attention = Attention(heads, head_dim, causal)
        self.norm_feed = nn.LayerNorm(dim)
        self.feed = nn.Sequential(
            OrderedDict(
                widen=nn.Linear(dim, expansion * dim),
                activation=nn.GELU(),
                narrow=nn.Linear(expansion * dim, dim),
            )
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        fed: torch.Tensor = self.dropout(self.feed(self.norm_feed(x)))
        return x + fed


def attention_params(depth: tuple[int, int], heads: tuple[int, ...], head_dims: tuple[int, ...]) -> list[Param]:
    """Return the size parameters of a stack of blocks. The width is heads x head_dim, so that it always divides."""
    return [
        Param("depth", IntDistribution(*depth), limits=(1, 1000)),
        Param("heads", CategoricalDistribution(heads), limits=(1, 1024)),
        Param("head_dim", CategoricalDistribution(head_dims), limits=(1, 1024)),
        Param("expansion", CategoricalDistribution((2, 4)), limits=(1, 64)),
        Param("dropout", FloatDistribution(0.0, 0.2), limits=(0.0, 0.95)),
    ]
