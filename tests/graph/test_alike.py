"""Nodes that do the same work: how they are recognised, and how a disturbed measurement is corrected."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from hydra_tune.graph.alike import kinds_of, medians
from hydra_tune.graph.capture import capture


def kinds(model: nn.Module, sizes: list[int] | None = None) -> list[object]:
    inputs = torch.randn(4, 8)
    captured = capture(model, inputs, [inputs])
    return list(kinds_of(model, captured, sizes or [0] * len(captured.nodes)))


def layer(width: int = 8, dropout: float = 0.1) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(dropout))


def test_layers_that_repeat_are_alike() -> None:
    found = kinds(nn.Sequential(layer(), layer(), layer(), nn.Linear(8, 3)))
    assert found[0] == found[1] == found[2] != found[3]


def test_widths_settings_and_types_tell_nodes_apart() -> None:
    assert len(set(kinds(nn.Sequential(layer(), layer(dropout=0.2))))) == 2
    assert len(set(kinds(nn.Sequential(layer(), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)))))) == 2
    frozen = nn.Sequential(layer(), layer())
    frozen[0].requires_grad_(False)
    assert len(set(kinds(frozen))) == 2, "a frozen layer has less to do"
    assert len(set(kinds(nn.Sequential(layer(), nn.Linear(8, 9), nn.Linear(9, 8))))) == 3


def test_what_was_counted_tells_nodes_apart() -> None:
    """The first layer hands no gradient on, which only its bytes show."""
    found = kinds(nn.Sequential(layer(), layer(), layer()), sizes=[1, 2, 2])
    assert sorted(Counter(found).values()) == [1, 2]


def test_settings_of_functions_count() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.one(x).softmax(dim=0)
            return self.other(x).softmax(dim=1)

    assert len(set(kinds(Mean()))) == 2


def test_a_disturbed_measurement_is_outvoted_by_alike_nodes() -> None:
    assert medians(["a", "b", "b", "b"], [[5.0, 1.0, 9.0, 1.2]]) == [5.0, 1.2, 1.2, 1.2]
    assert medians(["a", "b"], [[1.0, 2.0], [7.0, 2.0], [1.5, 2.5]]) == [1.5, 2.0]
