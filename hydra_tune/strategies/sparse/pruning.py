"""The options of pruning: the share of weights to remove, and the way to find them."""

from __future__ import annotations

from dataclasses import dataclass

MASKS = ("early-bird", "magnitude", "random")
"""Ways to find a mask."""


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """The share of weights to prune, and the way to find them."""

    sparsity: float
    mask: str
    """A name in MASKS, or a safetensors file of masks."""
    least: int = 1
    """Minimum number of survivors per layer."""
    dense_epochs: int
    """Maximum epochs of the search for a mask."""
    rewind: bool = False
    """True if the survivors restart from their initial weights."""
    mixed: bool = True
