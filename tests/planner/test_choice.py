"""The choice of a strategy for pools, memory and loads, as a table."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest

from hydra_tune.planner.admission import Admission, Room
from hydra_tune.planner.choice import Situation, choose
from hydra_tune.planner.planner import Corrections, Planner
from hydra_tune.planner.search_time import Job, bound, makespan
from hydra_tune.strategies.estimate import Estimate, refused
from hydra_tune.strategies.pool import Pool

TWO = Pool(devices=2, memory=100, host_bytes=10**6)
FOUR = Pool(devices=4, memory=100, host_bytes=10**6)


def takes(strategy: str, seconds: float, work: float | None = None, devices: int = 1) -> Estimate:
    return Estimate(
        strategy=strategy, seconds=seconds, work=seconds if work is None else work, batch_seconds=seconds / 10,
        devices=devices, device_bytes=50, parts=devices,
    )  # fmt: skip


WHOLE, SHARD = takes("whole", 10.0), takes("shard", 12.0)
PIPELINE = takes("pipeline", 6.0, 11.0, devices=2)
ELASTIC = takes("elastic", 4.0, 8.0, devices=2)
TOO_LARGE = refused("whole", "needs 200 B on a device of 100 B", smallest_budget=2**20)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("estimates", "pool", "rivals", "chosen"),
    [
        ([WHOLE, SHARD, PIPELINE], TWO, 3, "whole"),  # more trials than devices: the least work
        ([WHOLE, SHARD, PIPELINE], TWO, 2, "whole"),
        ([WHOLE, SHARD, PIPELINE], TWO, 1, "pipeline"),  # a device would idle
        ([WHOLE, SHARD, PIPELINE], FOUR, 2, "pipeline"),
        ([WHOLE, SHARD, PIPELINE], FOUR, 4, "whole"),
        ([TOO_LARGE, SHARD, PIPELINE], TWO, 3, "shard"),  # spilling against two devices at once
        ([TOO_LARGE, takes("shard", 40.0), PIPELINE], TWO, 3, "pipeline"),  # where spilling costs too much
        ([WHOLE, SHARD, takes("pipeline", 9.5, 11.0, 2)], TWO, 1, "whole"),  # a twentieth is not worth it
        ([WHOLE, PIPELINE, takes("elastic", 5.0, 9.5, 2)], TWO, 3, "whole"),
        ([WHOLE, PIPELINE, ELASTIC], TWO, 1, "elastic"),
        ([WHOLE, PIPELINE, takes("elastic", 5.0, 8.0, 2)], TWO, 1, "pipeline"),  # approximate: by a quarter at least
        ([TOO_LARGE, refused("shard", "a node is too large"), ELASTIC], TWO, 3, "elastic"),
    ],
)
def test_the_choice_follows_pool_memory_and_load(
    estimates: list[Estimate], pool: Pool, rivals: int, chosen: str
) -> None:
    found = choose(estimates, Situation(pool, rivals, epochs=3))
    assert found is not None
    assert found.strategy == chosen
    assert found.because
    assert len(found.stored()["options"]) == len(estimates)


@pytest.mark.parametrize(
    ("work", "left", "chosen"),
    [
        (2.0, 64, "pack"),
        (2.0, 8, "pack"),
        (2.0, 7, "whole"),  # fewer than four for each device: hardly any would be together
        (9.5, 64, "whole"),  # a twentieth is not worth it
        (20.0, 64, "whole"),
    ],
)
def test_trials_train_as_one_where_that_is_quicker_and_enough_are_left(work: float, left: int, chosen: str) -> None:
    pack = replace(takes("pack", 16 * work, work), members=16, parts=16)
    found = choose([WHOLE, PIPELINE, pack], Situation(TWO, 3, epochs=3, left=left))
    assert found is not None
    assert found.strategy == chosen
    if chosen == "pack":
        assert "up to 16 trials of its shape train as one, which is 5.0 times as quick per trial" in found.because
        assert found.stored()["predicted_device_bytes"] == 50 // 16


def test_each_of_those_that_train_as_one_is_admitted_with_its_share() -> None:
    admission = Admission(Room(host=100, disk=0, on_devices=1000), lambda line: None)
    planner = Planner(TWO, lambda: 3, admission, left=lambda: 64)
    pack = replace(takes("pack", 32.0, 2.0), members=16, parts=16, device_bytes=800)
    choice = planner.choose([WHOLE, pack], 1.0)
    assert choice is not None

    async def admit() -> None:
        for number in range(2):
            await planner.admit(number, choice)  # 50 bytes each

    asyncio.run(admit())
    assert not admission.room.holds([*admission._promised.values(), *admission._promised.values()])


def test_nothing_is_chosen_where_all_are_refused() -> None:
    assert choose([TOO_LARGE, refused("shard", "a node is too large")], Situation(TWO, 1, 1)) is None


def test_the_reason_names_what_decided() -> None:
    busy = choose([WHOLE, PIPELINE], Situation(TWO, 5, 1))
    cut = choose([TOO_LARGE, SHARD], Situation(TWO, 5, 1))
    spread = choose([WHOLE, PIPELINE], Situation(TWO, 1, 1))
    assert busy is not None
    assert "5 trials keep 2 devices busy" in busy.because
    assert cut is not None
    assert "needs 200 B on a device of 100 B" in cut.because
    assert spread is not None
    assert "1 of 2 devices would be idle" in spread.because
    assert "1.7 times" in spread.because


def planner(rivals: int) -> Planner:
    return Planner(TWO, lambda: rivals, Admission(Room(2**40, 0, 2**40), print))


def test_a_trial_moves_when_the_rest_is_worth_it() -> None:
    left = [WHOLE, PIPELINE]
    move = planner(1).reconsider(left, "whole", epochs=5, times=1.2)
    assert move is not None
    assert move.strategy == "pipeline"
    assert move.setup_seconds > 0
    assert planner(2).reconsider(left, "whole", epochs=5, times=1.2) is None  # no device is idle
    assert planner(1).reconsider(left, "whole", epochs=0.3, times=1.2) is None  # nearly done: the move costs more
    assert planner(1).reconsider(left, "pipeline", epochs=5, times=1.2) is None


def test_predictions_are_corrected_by_what_trials_took() -> None:
    found = planner(3)
    assert found.corrected([WHOLE])[0].seconds == 10.0
    for _ in range(20):
        found.corrections.add("whole", 2.0)
    assert found.corrected([WHOLE])[0].seconds == pytest.approx(20.0, rel=0.05)
    assert found.corrected([SHARD])[0].seconds == 12.0
    assert found.corrected([TOO_LARGE])[0] is TOO_LARGE


def test_one_disturbed_trial_is_no_rule() -> None:
    corrections = Corrections()
    corrections.add("whole", 1000.0)
    assert corrections.factors()["whole"] <= 2.0


def test_the_outlook_of_a_search() -> None:
    same = [Job(10.0, 10.0, 10.0)] * 5
    assert makespan(same, 2) == 30.0
    assert bound(same, 2) == 25.0
    last = [Job(10.0, 4.0, 11.0)] * 5  # the last one, alone, is spread over both devices
    assert makespan(last, 2) == pytest.approx(20.0 + 3.0 + 4.0)
    assert makespan([], 2) == 0.0
    assert math.isfinite(bound(last, 2))
