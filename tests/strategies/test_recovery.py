"""The rule by which strategies repeat lost work."""

from __future__ import annotations

import pytest

from hydra_tune.strategies.recovery import AGAIN, Recovery

pytestmark = pytest.mark.smoke


def test_the_same_work_is_done_again_a_few_times() -> None:
    recovery = Recovery()
    assert [recovery.again(7) for _ in range(AGAIN + 2)] == [True] * AGAIN + [False, False]


def test_a_trial_that_gets_further_may_lose_any_number_of_workers() -> None:
    recovery = Recovery()
    assert all(recovery.again(position) for position in range(50))


def test_a_loss_at_an_unknown_position_is_one_at_the_position_before() -> None:
    recovery = Recovery()
    assert recovery.again(3)
    assert [recovery.again(None) for _ in range(AGAIN)] == [True] * (AGAIN - 1) + [False]
    assert recovery.again(4), "it got further after all"


def test_each_of_several_members_may_lose_the_work_that_they_share() -> None:
    recovery = Recovery()
    assert [recovery.again(0, members=3) for _ in range(3 * AGAIN + 1)] == [True] * 3 * AGAIN + [False]
