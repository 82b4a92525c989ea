"""Rules by which a client and the centre exchange, on tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hydra_tune.strategies.elastic.centre import Rule


def elastic(alpha: float) -> Rule:
    """Return the elastic rule: both move by the same difference, keeping their sum; counters take the maximum."""

    def rule(_name: str, own: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
        if not own.is_floating_point():
            return centre.copy_(torch.maximum(own, centre))
        difference = alpha * (own - centre)
        centre += difference
        return own - difference

    return rule


def asynchronous(base: Mapping[str, torch.Tensor]) -> Rule:
    """Return a parameter server's rule: the client adds its change since the last exchange, then copies the centre."""

    def rule(name: str, own: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
        if not own.is_floating_point():
            return centre.copy_(torch.maximum(own, centre))
        centre += own - base[name]
        return centre.clone()

    return rule
