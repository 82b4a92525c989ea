"""TensorBytes compared with sums done by hand."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from hydra_tune.core.tensor_memory import TensorBytes

pytestmark = pytest.mark.smoke


def test_new_tensors_count_and_freed_ones_do_not() -> None:
    with TensorBytes() as count:
        a = torch.zeros(1000)
        b = a * 2
        assert count.live == 8000
        del a
        gc.collect()
        assert count.live == 4000
        view = b.view(10, 100)
        assert count.live == 4000
    assert count.peak == 8000
    assert view.shape == (10, 100)


def test_what_was_there_before_counts_once() -> None:
    model = nn.Linear(10, 10)
    with TensorBytes(model.parameters()) as count:
        model.weight.data.mul_(2)
    assert count.peak == 440


def test_what_is_changed_in_place_or_viewed_is_not_new() -> None:
    outside = torch.zeros(1000)
    with TensorBytes() as count:
        outside.add_(1).view(10, 100).mul_(2)
        assert count.peak == 0
        kept = outside + 1
        assert count.peak == 4000
    assert kept.numel() == 1000


def test_adam_takes_four_times_the_parameters_after_its_first_step() -> None:
    model = nn.Linear(300, 300, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    size = 300 * 300 * 4
    with TensorBytes(model.parameters()) as count:
        for _ in range(2):
            model(torch.zeros(1, 300)).sum().backward()
            optimizer.step()
            if _ == 0:
                optimizer.zero_grad()
        gc.collect()
        # parameters, gradients and two moments, and a few scalars
        assert 4 * size <= count.live < 4 * size + 4096
        assert count.peak >= 4 * size
