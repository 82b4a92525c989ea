"""Estimates of strategies from measured costs, compared with sums done by hand."""

from __future__ import annotations

import pytest

from hydra_tune.graph.costs import ShardCost
from hydra_tune.strategies.elastic import estimate as elastic
from hydra_tune.strategies.estimate import Epoch, Rehearsal
from hydra_tune.strategies.pipeline import estimate as pipeline
from hydra_tune.strategies.pipeline.estimate import StagedCosts
from hydra_tune.strategies.pool import Pool, Rates
from hydra_tune.strategies.shard import estimate as shards
from hydra_tune.strategies.sparse import estimate as sparse
from hydra_tune.strategies.subnets import estimate as subnets
from hydra_tune.strategies.whole import estimate as whole

MIB = 2**20
POOL = Pool(devices=2, memory=40 * MIB, host_bytes=2**30, disk_bytes=2**30)
EPOCH = Epoch(batches=10, rows=100, valid_batches=2, valid_rows=200)
RATES = Rates(host_read=1e9, host_write=1e9, disk_read=1e8, disk_write=1e8, copy=1e9)
REHEARSAL = Rehearsal(batch_seconds=1.0, judge_seconds=0.5, peak_bytes=30 * MIB, state_bytes=20 * MIB)


def shard(**fields: int | float) -> ShardCost:
    given: dict[str, int | float] = {
        "start": 0, "stop": 1, "forward_seconds": 0.1, "backward_seconds": 0.2, "step_seconds": 0.1,
        "parameter_bytes": 5 * MIB, "optimizer_bytes": 10 * MIB, "buffer_bytes": 0, "tied_bytes": 0,
        "activation_bytes": 2 * MIB, "in_bytes": MIB, "out_bytes": MIB, "gradient_bytes": 5 * MIB,
        "forward_working_bytes": 0, "backward_working_bytes": 0,
    }  # fmt: skip
    return ShardCost(**{**given, **fields})  # type: ignore[arg-type]


@pytest.mark.smoke
def test_whole_is_the_plain_loop() -> None:
    found = whole.from_rehearsal(REHEARSAL, EPOCH, POOL)
    assert found.seconds == found.work == 10 * 1.0 + 2 * 0.5
    assert (found.device_bytes, found.held_bytes) == (30 * MIB, 20 * MIB)


def test_what_does_not_fit_is_refused_with_the_budget_that_would_do() -> None:
    found = whole.from_rehearsal(Rehearsal(1.0, 0.0, 41 * MIB - 5, 30 * MIB), EPOCH, POOL)
    assert "41.0 MiB on a device of 40.0 MiB" in found.refused
    assert found.smallest_budget == 41 * MIB


def test_shards_that_all_fit_move_nothing() -> None:
    roomy = Pool(devices=2, memory=10**9, host_bytes=2**30)
    found = shards.from_costs([shard()] * 4, EPOCH, roomy, RATES, fetch_seconds=0.0)
    assert found.moved_bytes <= EPOCH.valid_batches * 4 * 5 * MIB  # the weights, once for each validation batch
    assert found.batch_seconds == pytest.approx(4 * 0.4, rel=0.01)


def test_shards_that_do_not_fit_pay_for_what_they_move() -> None:
    costs = [shard()] * 8
    read, written = shards.traffic(costs, POOL.memory)
    state = 8 * 15 * MIB
    assert state - POOL.memory <= written <= state + 8 * 2 * MIB
    assert written <= read <= 8 * (5 + 15 + 2) * MIB
    found = shards.from_costs(costs, EPOCH, POOL, RATES, fetch_seconds=0.0)
    assert found.batch_seconds == pytest.approx(8 * 0.4 + (read + written) / 1e9, rel=0.01)
    assert found.parts == 8
    assert found.device_bytes == POOL.memory
    hidden = Pool(devices=2, memory=40 * MIB, host_bytes=2**30, spare_cores=2)
    assert shards.from_costs(costs, EPOCH, hidden, RATES, fetch_seconds=0.0).seconds < found.seconds


def test_what_the_host_has_no_memory_for_goes_to_disk_and_is_slower() -> None:
    costs = [shard()] * 8
    roomy = shards.from_costs(costs, EPOCH, POOL, RATES, fetch_seconds=0.0)
    tight = Pool(devices=2, memory=40 * MIB, host_bytes=100 * MIB, disk_bytes=2**30)
    found = shards.from_costs(costs, EPOCH, tight, RATES, fetch_seconds=0.0)
    assert roomy.disk_bytes == 0 < found.disk_bytes
    assert found.seconds > roomy.seconds


def test_a_pipeline_takes_its_step_and_sends_its_boundaries_twice() -> None:
    staged = StagedCosts(
        step_seconds=0.6, busy_seconds=1.0, forward_seconds=0.05, microbatches=8, stages=2, device_bytes=9 * MIB,
        boundary_bytes=1000,
    )  # fmt: skip
    found = pipeline.from_stages(staged, EPOCH, POOL, fetch_seconds=0.01)
    assert found.batch_seconds == 0.6
    assert found.moved_bytes == 10 * 8 * 2 * 1000
    assert found.seconds < found.work
    assert found.devices == 2


def test_clients_exchange_twice_the_parameters_every_tau_steps() -> None:
    found = elastic.from_rehearsal(REHEARSAL, 1000, Epoch(batches=25), POOL, RATES)
    assert found.moved_bytes == 2 * 1000 * 3
    assert "one device" in elastic.from_rehearsal(
        REHEARSAL, 1000, EPOCH, Pool(devices=1, memory=40 * MIB, host_bytes=2**30), RATES
    ).refused  # fmt: skip


def test_subnets_hold_their_share() -> None:
    found = subnets.from_rehearsal(REHEARSAL, 0.25, 4 * MIB, EPOCH, POOL, RATES)
    assert found.device_bytes == round(0.25 * 20 * MIB + 10 * MIB / 2)
    assert found.work < 10.0 + 2.0


@pytest.mark.parametrize(
    ("pruned", "dense", "says"),
    [
        (2, 4, "`stages: auto`: it takes 2 stages, dense would need 4"),
        (3, None, "it takes 3 stages (no number of stages holds dense), and there are 2 devices"),
        (None, None, "`shards: true`"),
    ],
)
def test_a_plan_says_how_many_stages_a_pruned_network_takes(pruned: int | None, dense: int | None, says: str) -> None:
    assert says in sparse.instead_of_replicas(pruned, dense, POOL)
