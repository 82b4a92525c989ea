"""Masks: which weights survive, and when they have settled."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hydra_tune.core.errors import CandidateError
from hydra_tune.strategies.sparse.masks import (
    EarlyBird,
    by_chance,
    by_magnitude,
    distance,
    given_masks,
    magnitude_masks,
    prunable,
    random_masks,
    survivors,
)

pytestmark = pytest.mark.smoke


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv1d(2, 8, 3), nn.BatchNorm1d(8), nn.Flatten(), nn.Linear(8 * 4, 5))


def test_matrices_and_filters_of_layers_are_pruned_but_no_embeddings_tables_norms_biases_and_frozen_weights():
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.norm = nn.LayerNorm(4)
            self.attention = nn.MultiheadAttention(4, 2)
            self.head = nn.Linear(4, 10)
            self.head.weight = self.embedding.weight
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.lstm = nn.LSTM(4, 4)
            self.positions = nn.Parameter(torch.randn(6, 4))
            self.token = nn.ParameterList([nn.Parameter(torch.randn(1, 1, 4))])

    assert set(prunable(Mixed())) == {"attention.in_proj_weight", "attention.out_proj.weight"}
    assert set(prunable(network())) == {"0.weight", "3.weight"}


@given(size=st.integers(1, 300), sparsity=st.floats(0, 0.999), least=st.integers(1, 20))
def test_each_layer_keeps_its_share_and_at_least_a_few(size: int, sparsity: float, least: int):
    keep = survivors(size, sparsity, least)
    assert min(least, size) <= keep <= size
    assert keep in (min(least, size), round(size * (1 - sparsity)))
    weight = torch.randn(size, generator=torch.Generator().manual_seed(size))
    mask = by_magnitude(weight, keep)
    assert mask.dtype == torch.int32
    assert len(mask) == keep
    assert bool((mask.diff() > 0).all())
    gone = torch.ones(size, dtype=torch.bool)
    gone[mask.long()] = False
    if bool(gone.any()):
        assert weight[mask.long()].abs().min() >= weight[gone].abs().max()


def test_equal_weights_survive_in_order_so_that_every_replica_has_the_same_mask():
    assert by_magnitude(torch.ones(2, 5), 3).tolist() == [0, 1, 2]


def test_random_masks_depend_on_the_seed_only():
    one, same, other = (random_masks(network(), 0.5, 1, seed) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["3.weight"], other["3.weight"])
    assert sorted(set(by_chance(torch.zeros(6), 6, torch.Generator()).tolist())) == list(range(6))


def test_given_masks_are_checked():
    model = network()
    weight = model[3].weight
    mask = torch.zeros_like(weight)
    mask[1, 2] = 1
    assert given_masks(model, {"3.weight": mask})["3.weight"].tolist() == [32 + 2]
    with pytest.raises(CandidateError, match=r"shape \(3, 3\) \(give one of shape \(5, 32\)"):
        given_masks(model, {"3.weight": torch.ones(3, 3)})
    with pytest.raises(CandidateError, match=r"'3.wieght', which is no parameter .did you mean '3.weight'"):
        given_masks(model, {"3.wieght": mask})
    with pytest.raises(CandidateError, match="leaves nothing"):
        given_masks(model, {"3.weight": torch.zeros_like(weight)})


@given(st.data())
def test_distance_is_the_share_of_survivors_that_are_not_common(data: st.DataObject):
    size = data.draw(st.integers(1, 40))
    keep = data.draw(st.integers(1, size))
    sets = [data.draw(st.sets(st.integers(0, size - 1), min_size=keep, max_size=keep)) for _ in range(2)]
    one, other = (torch.tensor(sorted(each), dtype=torch.int32) for each in sets)
    assert distance(one, other, size) == pytest.approx(len(sets[0] ^ sets[1]) / (2 * keep))


def test_early_bird_settles_only_when_the_masks_stay():
    model, bird = network(), EarlyBird(window=3)
    assert [bird.see(model, 0.9, 1) for _ in range(2)] == [math.inf, math.inf]
    assert bird.see(model, 0.9, 1) == 0.0
    with torch.no_grad():
        for weight in prunable(model).values():
            weight.copy_(torch.randn(weight.shape))
    assert bird.see(model, 0.9, 1) > 0.5, "at 90% sparsity, chance leaves few in common"
    again = EarlyBird(window=3)
    again.restore(bird.state())
    assert again.see(model, 0.9, 1) == bird.see(model, 0.9, 1)
    assert set(magnitude_masks(model, 0.9, 1)) == set(again.recent[-1])
