"""The batches of a DataLoader by position equal the loader's own, in whatever order they are requested."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from hydra_tune.core.errors import CandidateError
from hydra_tune.training.batches import Batches
from hydra_tune.training.loaders import LoaderBatches, LoaderData
from tests.candidates import small_candidate

pytestmark = pytest.mark.smoke
CANDIDATE = small_candidate()
DATA = TensorDataset(torch.arange(23), torch.arange(23))


def as_they_are(batch: Any, position: int) -> tuple[Any, Any]:
    return batch[0].tolist(), position


def batches(loader: Any, seed: int = 0) -> LoaderBatches:
    made = Batches(CANDIDATE, LoaderData.of(loader, as_they_are, "loader"), training=True, seed=seed)
    assert isinstance(made, LoaderBatches)
    return made


def epoch(made: Batches, number: int) -> list[list[int]]:
    return [made.fetch(number, position)[0] for position in range(len(made))]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(4)


LOADERS = {
    "in order": lambda: DataLoader(DATA, batch_size=5),
    "dropping": lambda: DataLoader(DATA, batch_size=5, drop_last=True, shuffle=True, generator=generator()),
    "own generator": lambda: DataLoader(DATA, batch_size=5, shuffle=True, generator=generator()),
    "sampler's generator": lambda: DataLoader(DATA, batch_size=5, sampler=RandomSampler(DATA, generator=generator())),
    "batch sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(range(3, 20), 4, drop_last=False)),
    "workers": lambda: DataLoader(DATA, batch_size=5, num_workers=1, shuffle=True, generator=generator()),
}


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_they_are_the_loaders_own(make: Any) -> None:
    loader, made = make(), batches(make())
    expected = [[batch[0].tolist() for batch in loader] for _ in range(3)]
    assert [epoch(made, number) for number in range(3)] == expected
    assert made.rows == sum(map(len, expected[0]))
    assert [made.rows_at(position) for position in range(len(made))] == [len(batch) for batch in expected[2]]
    # In another process a trial begins anywhere, and goes back.
    again = batches(make())
    assert again.fetch(2, 1)[0] == expected[2][1]
    assert again.fetch(0, 2) == (expected[0][2], 2)
    assert again.fetch(1, 0)[0] == expected[1][0]


def test_without_a_generator_the_order_is_the_seeds() -> None:
    def orders(seed: int) -> list[Any]:
        made = batches(DataLoader(DATA, batch_size=5, shuffle=True), seed)
        return [epoch(made, number) for number in range(2)]

    before = torch.get_rng_state()
    assert orders(1) == orders(1)
    assert orders(1) != orders(2)
    assert orders(1)[0] != orders(1)[1]
    assert torch.equal(torch.get_rng_state(), before), "the training stream is not moved"


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(("loader", "message"), [
    ([1, 2], "loader is a list"), (DataLoader(Stream()), "an IterableDataset"),
    (DataLoader(DATA, batch_size=None), "makes no batches"),
])  # fmt: skip
def test_what_cannot_be_taken_up_anywhere_is_refused(loader: Any, message: str) -> None:
    with pytest.raises(CandidateError, match=message):
        LoaderData.of(loader, as_they_are, "loader")
