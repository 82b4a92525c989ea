"""What a client and the centre give each other: the rules of exchange, on tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hydra_tune.elastic.centre import Rule

BETA = 0.9
"""The sum of all clients' pulls (arXiv 1412.6651): with K clients each has a K-th of it."""


def elastic(alpha: float) -> Rule:
    """Both move towards each other by the same difference, so that their sum stays; counters go to the furthest."""

    def rule(_name: str, own: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
        if not own.is_floating_point():
            return centre.copy_(torch.maximum(own, centre))
        difference = alpha * (own - centre)
        centre += difference
        return own - difference

    return rule


def asynchronous(base: Mapping[str, torch.Tensor]) -> Rule:
    """A plain parameter server: the client adds what it has learned since it took the centre, and takes it again."""

    def rule(name: str, own: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
        if not own.is_floating_point():
            return centre.copy_(torch.maximum(own, centre))
        centre += own - base[name]
        return centre.clone()

    return rule
