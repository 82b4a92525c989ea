"""Batches: every row once an epoch, in an order that only the seed and the epoch decide."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, TensorDataset

import hydra_tune as ht
from hydra_tune.core.trees import call_model, move
from hydra_tune.training.batches import Batches, epoch_order
from tests.candidates import rows, small_candidate

pytestmark = pytest.mark.smoke


@given(st.integers(1, 200), st.integers(1, 50), st.integers(0, 2**31), st.integers(0, 20))
def test_an_epoch_has_every_row_once(count: int, size: int, seed: int, epoch: int) -> None:
    data = TensorDataset(torch.arange(count), torch.arange(count))
    batches = Batches(small_candidate(batch_size=size), data, training=True, seed=seed)
    seen = torch.cat([batches.fetch(epoch, i)[0] for i in range(len(batches))])
    assert sorted(seen.tolist()) == list(range(count))
    assert sum(batches.rows_at(i) for i in range(len(batches))) == count
    assert torch.equal(seen, epoch_order(count, seed, epoch))


def test_epochs_and_seeds_give_different_orders() -> None:
    orders = {tuple(epoch_order(50, seed, epoch).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_without_shuffle_rows_come_in_dataset_order() -> None:
    data = TensorDataset(torch.arange(10), torch.arange(10))
    batches = Batches(small_candidate(batch_size=4, shuffle=False), data, training=True, seed=3)
    assert [batches.fetch(e, 0)[0].tolist() for e in (0, 1)] == [[0, 1, 2, 3]] * 2


def test_drop_last_leaves_the_small_batch_out_in_training_only() -> None:
    candidate = small_candidate(batch_size=10, drop_last=True)
    assert len(Batches(candidate, rows(103), training=True)) == 10
    assert len(Batches(candidate, rows(103), training=False)) == 11


class Words(Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> tuple[dict[str, torch.Tensor], int]:
        return {"a": torch.full((2,), float(i)), "b": torch.tensor(i)}, i


def test_rows_one_by_one_equal_rows_at_once() -> None:
    fast = rows(20)
    slow = [fast[i] for i in range(20)]
    for candidate in (small_candidate(batch_size=7),):
        one, other = (Batches(candidate, data, training=True, seed=1).fetch(0, 1) for data in (fast, slow))
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_dict_inputs_are_keywords_and_tuples_are_positions() -> None:
    inputs, _ = Batches(small_candidate(batch_size=3, shuffle=False), Words(), training=True).fetch(0, 0)
    assert inputs["a"].shape == (3, 2)

    class Sum(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a.sum() * 10 + b.sum()

    assert call_model(Sum(), inputs) == 63
    assert call_model(Sum(), (inputs["a"], inputs["b"])) == 63
    assert call_model(torch.nn.Identity(), inputs["b"]).tolist() == [0, 1, 2]


def test_moving_keeps_the_structure() -> None:
    batch = {"x": (torch.ones(2), [torch.zeros(1), "label"])}
    moved = move(batch, torch.device("cpu"))
    assert isinstance(moved["x"], tuple)
    assert moved["x"][1][1] == "label"


def test_a_dataset_without_targets_is_explained() -> None:
    only_inputs = TensorDataset(torch.zeros(4, 2))
    with pytest.raises(ht.CandidateError, match=r"\(inputs, targets\)"):
        Batches(small_candidate(), only_inputs, training=True).fetch(0, 0)


def test_a_dataset_may_have_batches_of_its_own_that_mean_something_else() -> None:
    class Odd(TensorDataset):
        batches = 7

    data = Odd(torch.arange(4), torch.arange(4))
    assert type(Batches(small_candidate(batch_size=2), data, training=False)) is Batches
