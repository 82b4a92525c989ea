"""Limits of a search: the number of trials in flight."""

from __future__ import annotations

import pytest

from hydra_tune.coordinator.failures import Failures
from hydra_tune.coordinator.limits import Limits
from hydra_tune.coordinator.settings import SearchSettings
from hydra_tune.strategies.base import Strategy
from hydra_tune.strategies.shard.strategy import Shard
from hydra_tune.strategies.whole.strategy import Whole


def most_in_flight(strategy: Strategy, *, ended: int, trials: int = 9, concurrency: int | None = None) -> int:
    settings = SearchSettings(trials=trials, concurrency=concurrency)
    limits = Limits(settings, strategy, 2, Failures(print))
    running = 0
    while ended + running < trials and limits.has_room(running, ended):
        running += 1
    return running


@pytest.mark.parametrize(("ended", "most"), [(0, 3), (3, 3), (4, 5), (5, 4), (8, 1)])
def test_the_last_trials_in_shards_are_all_in_flight(ended: int, most: int) -> None:
    assert most_in_flight(Shard(), ended=ended) == most


def test_others_are_not() -> None:
    assert most_in_flight(Whole(), ended=5) == 2
    assert most_in_flight(Shard(), ended=5, concurrency=2) == 2
