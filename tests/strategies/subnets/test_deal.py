"""Dealing, taking and putting back, for all depths, widths and numbers of subnets: each part is used exactly once."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hydra_tune.strategies.subnets.deal import deal, in_use, mean, put, take
from hydra_tune.strategies.subnets.find import find_structure
from hydra_tune.strategies.subnets.shrink import subnet
from hydra_tune.strategies.subnets.structure import Cut, Group, Structure

widths = st.lists(st.integers(8, 40), min_size=1, max_size=4)


def perceptron(inputs: int, hidden: list[int], outputs: int, norm: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(inputs, width), *([nn.BatchNorm1d(width)] if norm else []), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, outputs))


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach() for name, t in [*model.named_parameters(), *model.named_buffers()]}


@pytest.mark.smoke
@settings(max_examples=40, deadline=None)
@given(hidden=widths, subnets=st.integers(1, 8), seed=st.integers(0, 2**31), turn=st.integers(0, 10**6))
def test_a_deal_is_a_permutation_of_each_group(hidden: list[int], subnets: int, seed: int, turn: int) -> None:
    structure = Structure(tuple(Group(f"{i}", "neurons", width) for i, width in enumerate(hidden)))
    parts = deal(structure, subnets, seed, turn)
    for group in structure.groups:
        dealt = [part[group.name] for part in parts]
        assert sorted(torch.cat(dealt).tolist()) == list(range(group.width))
        sizes = [len(members) for members in dealt]
        assert max(sizes) - min(sizes) <= 1
    again = deal(structure, subnets, seed, turn)
    assert all(torch.equal(one[name], other[name]) for one, other in zip(parts, again, strict=True) for name in one)


def test_every_round_deals_anew() -> None:
    structure = Structure((Group("g", "neurons", 64), Group("h", "neurons", 64)))
    seen = {tuple(deal(structure, 2, 1, turn)[0]["g"].tolist()) for turn in range(20)}
    assert len(seen) == 20
    part = deal(structure, 2, 1, 0)[0]
    assert not torch.equal(part["g"], part["h"]), "groups are dealt independently"
    assert not torch.equal(part["g"], deal(structure, 2, 2, 0)[0]["g"])


@settings(max_examples=40, deadline=None)
@given(hidden=widths, subnets=st.integers(1, 8), norm=st.booleans(), turn=st.integers(0, 99))
def test_what_is_taken_out_and_put_back_changes_nothing(hidden: list[int], subnets: int, norm: bool, turn: int) -> None:
    model = perceptron(5, hidden, 3, norm)
    structure = find_structure(model, torch.randn(3, 5), subnets)
    for name, tensor in tensors_of(model).items():
        if structure.is_shared(name):
            continue
        whole = tensor.clone()
        for dealt in deal(structure, subnets, 0, turn):
            part = take(structure, dealt, name, tensor)
            assert part is not None
            put(structure, dealt, name, whole, part)
        assert torch.equal(whole, tensor)


@settings(max_examples=40, deadline=None)
@given(hidden=widths, subnets=st.integers(1, 8), turn=st.integers(0, 99))
def test_parts_are_disjoint(hidden: list[int], subnets: int, turn: int) -> None:
    model = perceptron(5, hidden, 3)
    structure = find_structure(model, torch.randn(3, 5), subnets)
    for name, tensor in tensors_of(model).items():
        if structure.is_shared(name):
            assert name == f"{2 * len(hidden)}.bias", "only the output's bias belongs to all"
            continue
        times = torch.zeros_like(tensor)
        for dealt in deal(structure, subnets, 0, turn):
            mark = torch.zeros_like(tensor)
            part = take(structure, dealt, name, tensor)
            assert part is not None
            put(structure, dealt, name, mark, torch.ones_like(part))
            times += mark
        assert times.max() <= 1
        one_side = len(structure.cuts_of(name)) == 1
        assert times.min() == 1 if one_side or subnets == 1 else times.mean() < 1


@settings(max_examples=40, deadline=None)
@given(hidden=widths, subnets=st.integers(1, 8), turn=st.integers(0, 99))
def test_subnets_have_the_sizes_of_the_formula(hidden: list[int], subnets: int, turn: int) -> None:
    """d·h1 + Σ h_l·h_(l+1) + h_L·C weights, where each h is what the subnet was dealt; and a bias for each."""
    model = perceptron(5, hidden, 3)
    structure = find_structure(model, torch.randn(3, 5), subnets)
    for index, dealt in enumerate(deal(structure, subnets, 0, turn)):
        sizes = [width // subnets + (index < width % subnets) for width in hidden]
        formula = 5 * sizes[0] + sum(a * b for a, b in pairwise(sizes)) + sizes[-1] * 3
        made = subnet(model, structure, dealt, tensors_of(model))
        assert sum(p.numel() for p in made.parameters()) == formula + sum(sizes) + 3
        if not any(width % subnets for width in hidden):
            n, h = subnets, hidden
            paper = 5 * h[0] / n + sum(a * b for a, b in pairwise(h)) / n**2 + h[-1] * 3 / n
            assert formula == paper


@settings(max_examples=30, deadline=None)
@given(
    outer=st.integers(1, 3), width=st.integers(1, 12), inner=st.integers(1, 4), dim=st.integers(0, 2),
    subnets=st.integers(1, 5),
)  # fmt: skip
def test_members_that_lie_apart_are_found_and_put_back(
    outer: int, width: int, inner: int, dim: int, subnets: int
) -> None:
    """As heads lie in queries, keys and values, and filters in what was flattened."""
    shape = [2, 3, 4]
    shape[dim] = outer * width * inner
    structure = Structure((Group("g", "heads", width, (Cut("w", dim, outer, inner),)),))
    tensor, whole = torch.randn(shape), torch.zeros(shape)
    split = tensor.movedim(dim, 0).unflatten(0, (outer, width, inner))
    for dealt in deal(structure, subnets, 0, 0):
        part = take(structure, dealt, "w", tensor)
        assert part is not None
        assert torch.equal(part, split[:, dealt["g"]].flatten(0, 2).movedim(0, dim))
        put(structure, dealt, "w", whole, part)
    assert torch.equal(whole, tensor)


def test_shared_parts_are_averaged_and_counters_go_to_the_furthest() -> None:
    assert torch.equal(mean([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])]), torch.tensor([2.0, 4.0]))
    assert torch.equal(mean([torch.tensor(3), torch.tensor(5)]), torch.tensor(5))


def test_in_use_a_sum_over_all_members_is_what_subnets_gave_on_average() -> None:
    """Without hidden non-linearities between, the scaled whole gives the mean of its subnets' outputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    x = torch.randn(7, 4, dtype=torch.float64)
    structure = find_structure(model, x, 3)
    tensors: Any = tensors_of(model)
    outputs = [subnet(model, structure, dealt, tensors)(x) for dealt in deal(structure, 3, 0, 0)]
    scaled = in_use(structure, 3, tensors)
    found = torch.func.functional_call(model, scaled, x)
    torch.testing.assert_close(found, torch.stack(outputs).mean(0), rtol=0, atol=1e-12)
    assert all(torch.equal(tensors[name], in_use(structure, 1, tensors)[name]) for name in tensors)
