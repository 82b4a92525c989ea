"""Heads of attention, and hidden units of transformer layers, that can be dealt out.

torch's own `MultiheadAttention` and transformer layers are known here. Any other module describes the heads in its
parameters with two methods:

    def heads_in(self) -> tuple[int, dict[str, tuple[int, int, int]]]:
        # The number of heads; and for each parameter made of heads: the dimension of the heads, the number of equal
        # parts of that dimension (3 for queries, keys and values in one), and the entries per head.
    def keep_heads(self, count: int) -> None:
        # The parameters now hold this many heads: adapt all attributes that depend on the number.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn import functional

from hydra_tune.strategies.subnets.structure import Cut, Group


@runtime_checkable
class HasHeads(Protocol):
    """An attention module that can work with fewer heads."""

    def heads_in(self) -> tuple[int, dict[str, tuple[int, int, int]]]: ...

    def keep_heads(self, count: int) -> None: ...


def heads(name: str, module: nn.Module) -> Group | None:
    """Return the heads of an attention module; None for any other module."""
    if isinstance(module, HasHeads):
        count, places = module.heads_in()
        cuts = (Cut(f"{name}.{own}", *where, scaled=where[0] > 0) for own, where in places.items())
        return Group(name, "heads", count, tuple(cuts))
    if isinstance(module, nn.MultiheadAttention) and _is_plain(module):
        size = module.head_dim
        cuts_list = [Cut(f"{name}.in_proj_weight", 0, 3, size), Cut(f"{name}.out_proj.weight", 1, 1, size, scaled=True)]
        if module.in_proj_bias is not None:
            cuts_list.append(Cut(f"{name}.in_proj_bias", 0, 3, size))
        return Group(name, "heads", module.num_heads, tuple(cuts_list))
    return None


def units(name: str, module: nn.Module) -> Group | None:
    """Return the hidden units of one of torch's transformer layers; None for any other module."""
    if not isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return None
    cuts = [Cut(f"{name}.linear1.weight", 0), Cut(f"{name}.linear2.weight", 1, scaled=True)]
    if module.linear1.bias is not None:
        cuts.append(Cut(f"{name}.linear1.bias", 0))
    return Group(f"{name}.linear1", "neurons", module.linear1.out_features, tuple(cuts))


def _is_plain(module: nn.MultiheadAttention) -> bool:
    extra = module.bias_k is not None or module.bias_v is not None or module.add_zero_attn
    return module._qkv_same_embed_dim and not extra


class SomeHeads(nn.MultiheadAttention):
    """torch's attention with some of its heads; inputs and outputs keep their full width."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, None]:
        assert self.in_proj_weight is not None
        weights = self.in_proj_weight.chunk(3)
        biases: Any = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        given = (query, key, value) if self.batch_first else (each.transpose(0, 1) for each in (query, key, value))
        queries, keys, values = (
            functional.linear(each, weight, bias).view(*each.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            for each, weight, bias in zip(given, weights, biases, strict=True)
        )
        seen = functional.scaled_dot_product_attention(
            queries, keys, values, self._mask(attn_mask, key_padding_mask, queries),
            dropout_p=self.dropout if self.training else 0.0,
        )  # fmt: skip
        merged = self.out_proj(seen.transpose(1, 2).flatten(2))
        return (merged if self.batch_first else merged.transpose(0, 1)), None

    def _mask(
        self, attn_mask: torch.Tensor | None, padding: torch.Tensor | None, like: torch.Tensor
    ) -> torch.Tensor | None:
        """Combine both masks into one that is added to the scores."""
        found: torch.Tensor | None = None
        for mask in (attn_mask, None if padding is None else padding[:, None, None, :]):
            if mask is None:
                continue
            if mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, float("-inf"))
            found = mask if found is None else found + mask
        return found
