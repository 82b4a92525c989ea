"""Gangs: the order in which seats are given, and real process groups on real workers."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hydra_tune.core.errors import WorkerLost
from hydra_tune.engine import engine as engine_module
from hydra_tune.engine import gangs
from hydra_tune.engine.engine import Engine
from hydra_tune.engine.gangs import Gang, Seats
from hydra_tune.engine.unit import Unit, UnitFailed, UnitHung, UnitResult
from hydra_tune.engine.worker import WorkerContext
from tests.engine.test_engine import engine, pid, wait_for

# Seats, without processes


def test_a_bound_seat_is_for_its_worker_only_and_free_ones_for_anybody():
    gang = Gang({1: 7, 2: None, 3: None})
    assert gang.open_seat(7) == 1
    assert gang.open_seat(8) == 2
    gang.taken[2] = 8
    assert gang.open_seat(8) is None, "a worker sits once"
    assert gang.open_seat(9) == 3
    gang.taken |= {1: 7, 3: 9}
    assert gang.full
    assert gang.open_seat(4) is None


def test_while_one_gang_is_seated_the_seats_of_others_wait():
    seats, one, two = Seats(), Gang({1: None, 2: None}), Gang({3: None, 4: None})
    seats.add(one)
    seats.add(two)
    assert list(seats.begin(one)) == [3, 4]
    assert seats.gathering is one
    assert list(seats.leave(two)) == [], "a gang that gives up waiting releases nobody"
    seats.add(two)
    assert list(seats.leave(one)) == [3, 4]
    assert seats.gathering is None


# Real gangs


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def add_up(context: WorkerContext, value: float) -> tuple[int, float, int]:
    total = torch.tensor([value])
    dist.all_reduce(total)
    return dist.get_rank(), float(total), os.getpid()


def add_up_after(context: WorkerContext, value: float, path: str) -> float:
    """Rank 1 waits for the test before it joins in."""
    if dist.get_rank() == 1:
        wait_for(context, path)
    total = torch.tensor([value])
    dist.all_reduce(total)
    return float(total)


def fail_as_rank_1(context: WorkerContext) -> None:
    if dist.get_rank() == 1:
        raise KeyError("lr")
    dist.all_reduce(torch.ones(1))


def fail_as_rank_0_while_the_other_is_busy(context: WorkerContext) -> None:
    if dist.get_rank() == 0:
        raise KeyError("lr")
    time.sleep(5)


def fail_to_join(context: WorkerContext, path: str) -> None:
    """Wait, briefly, for a member that never comes."""
    gangs.WAIT_SECONDS, patience = 0.1, gangs.WAIT_SECONDS
    try:
        gangs.join_group(gangs.Seat(0, 2, path), context.device)
    finally:
        gangs.WAIT_SECONDS = patience


def members(work: Any, *args: tuple[Any, ...], trial: int = 0, workers: tuple[int | None, ...] = (None, None),
            deadline: float | None = None) -> list[Unit]:  # fmt: skip
    return [
        Unit(trial=trial, attempt=f"t{trial}", kind="gang", work=work, args=each, worker=worker, deadline=deadline)
        for each, worker in zip(args, workers, strict=True)
    ]


def single(work: Any, *args: Any, trial: int = 9) -> Unit:
    return Unit(trial=trial, attempt=f"t{trial}", kind="one", work=work, args=args)


def stores(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob("gang-*"))


async def started(path: Path) -> None:
    while not path.with_name(path.name + ".started").exists():
        await asyncio.sleep(0.01)


@in_a_loop
async def test_members_are_ranks_of_one_group_and_bound_ones_come_back(tmp_path: Path):
    async with engine(tmp_path) as (running, record):
        first = await running.run_gang(members(add_up, (1.0,), (2.0,)))
        again = await running.run_gang(members(add_up, (10.0,), (20.0,), workers=tuple(r.worker for r in first)))
    assert [result.value[:2] for result in first] == [(0, 3.0), (1, 3.0)]
    assert [result.value[:2] for result in again] == [(0, 30.0), (1, 30.0)]
    assert [r.value[2] for r in again] == [r.value[2] for r in first], "each on its own worker"
    assert len({result.device for result in first}) == 2
    assert not stores(tmp_path)
    assert len(record.ended) == 4


@in_a_loop
async def test_many_gangs_and_single_units_at_once_do_not_deadlock(tmp_path: Path):
    async with engine(tmp_path, devices=3) as (running, record):
        gangs = [running.run_gang(members(add_up, (float(i),), (1.0,), trial=i)) for i in range(6)]
        trios = [
            running.run_gang(members(add_up, (float(i),), (1.0,), (1.0,), trial=10 + i, workers=(None,) * 3))
            for i in range(3)
        ]
        ones = [running.run(single(pid, trial=20 + i)) for i in range(12)]
        found: list[Any] = await asyncio.gather(*gangs, *trios, *ones)
    assert not record.lost
    assert [result[0].value[1] for result in found[:6]] == [i + 1.0 for i in range(6)]
    assert [result[0].value[1] for result in found[6:9]] == [i + 2.0 for i in range(3)]
    assert all(isinstance(result, UnitResult) for result in found[9:])


@in_a_loop
async def test_a_gang_waits_for_units_that_run_and_goes_before_those_that_wait(tmp_path: Path):
    async with engine(tmp_path) as (running, record):
        held = asyncio.create_task(running.run(single(wait_for, str(tmp_path / "go"), trial=1)))
        await started(tmp_path / "go")
        gang = asyncio.create_task(running.run_gang(members(add_up, (1.0,), (2.0,), trial=2)))
        await asyncio.sleep(0)
        later = [asyncio.create_task(running.run(single(pid, trial=3 + i))) for i in range(4)]
        (tmp_path / "go").touch()
        await asyncio.gather(held, gang, *later)
    order = [unit.trial for unit, _ in record.started]
    assert order[:3] == [1, 2, 2], order


@in_a_loop
async def test_a_member_that_is_killed_fails_the_gang_and_the_other_lives_on(tmp_path: Path):
    async with engine(tmp_path) as (running, _):
        gang = asyncio.create_task(running.run_gang(members(add_up_after, (1.0, "x"), (2.0, str(tmp_path / "go")))))
        await started(tmp_path / "go")
        victim = _pid_of_rank_1(running)
        survivor = _other(running, victim)
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(WorkerLost, match="signal 9"):
            await gang
        pids = {(await running.run(single(pid, trial=4 + i))).value for i in range(4)}
        again = await running.run_gang(members(add_up, (1.0,), (2.0,)))
    assert survivor in pids
    assert again[0].value[1] == 3.0
    assert not stores(tmp_path)


def _pid_of_rank_1(running: Engine) -> int:
    seated = {
        job.gang.seat_of(job.id).rank: worker.process.pid
        for worker in running._workers.values() for job in worker.jobs.values() if job.gang is not None
    }  # fmt: skip
    return seated[1]


def _other(running: Engine, pid: int) -> int:
    return next(worker.process.pid for worker in running._workers.values() if worker.process.pid != pid)


@in_a_loop
async def test_a_worker_whose_group_could_not_be_formed_finds_the_members_of_the_next(tmp_path: Path):
    async with engine(tmp_path, devices=2) as (running, _):
        there = running.workers_of_all_devices()
        with pytest.raises(UnitFailed):
            await running.run(replace(single(fail_to_join, str(tmp_path / "lonely")), worker=there[0]))
        results = await running.run_gang(members(add_up, (1.0,), (2.0,), workers=there, deadline=60.0))
        assert [result.value[:2] for result in results] == [(0, 3.0), (1, 3.0)]


@in_a_loop
async def test_the_failure_that_the_others_follow_from_is_raised(tmp_path: Path):
    async with engine(tmp_path) as (running, record):
        for _ in range(3):
            with pytest.raises(UnitFailed, match="KeyError: 'lr'"):
                await running.run_gang(members(fail_as_rank_1, (), ()))
        assert (await running.run_gang(members(add_up, (1.0,), (2.0,))))[0].value[1] == 3.0
    assert not record.lost, "no worker was given up for it"


@in_a_loop
async def test_a_member_that_is_killed_for_another_s_failure_is_not_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(engine_module, "GANG_GRACE", 0.2)
    async with engine(tmp_path) as (running, _):
        with pytest.raises(UnitFailed, match="KeyError: 'lr'"):
            await running.run_gang(members(fail_as_rank_0_while_the_other_is_busy, (), ()))


@in_a_loop
async def test_a_worker_does_not_take_a_free_seat_where_it_has_its_own(tmp_path: Path):
    async with engine(tmp_path) as (running, _):
        for worker in running.workers_of_all_devices():
            unit = members(add_up, (1.0,), (2.0,), workers=(None, worker))
            found = await running.run_gang(unit)
            assert found[1].worker == worker


@in_a_loop
async def test_a_member_that_hangs_is_ended_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_module, "GANG_GRACE", 2.0)
    async with engine(tmp_path) as (running, _):
        unit = members(add_up_after, (1.0, "x"), (2.0, str(tmp_path / "never")), deadline=1.0)
        with pytest.raises(UnitHung):
            await running.run_gang(unit)
        assert (await running.run_gang(members(add_up, (1.0,), (2.0,))))[0].value[1] == 3.0


@in_a_loop
async def test_a_gang_that_is_given_up_while_it_is_seated_frees_its_seats(tmp_path: Path):
    async with engine(tmp_path) as (running, _):
        held = asyncio.create_task(running.run(single(wait_for, str(tmp_path / "go"), trial=1)))
        await started(tmp_path / "go")
        gang = asyncio.create_task(running.run_gang(members(add_up, (1.0,), (2.0,), trial=2)))
        await asyncio.sleep(0)
        gang.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gang
        (await asyncio.wait_for(running.run(single(pid, trial=3)), 60))
        (tmp_path / "go").touch()
        await held


@in_a_loop
async def test_another_takes_the_seat_of_a_worker_that_dies_in_it(tmp_path: Path):
    async with engine(tmp_path) as (running, record):
        held = asyncio.create_task(running.run(single(wait_for, str(tmp_path / "go"), trial=1)))
        await started(tmp_path / "go")
        busy = next(w.process.pid for w in running._workers.values() if w.jobs)
        gang = asyncio.create_task(running.run_gang(members(add_up, (1.0,), (2.0,), trial=2)))
        await asyncio.sleep(0)
        os.kill(_other(running, busy), signal.SIGKILL)
        while not record.lost:
            await asyncio.sleep(0.01)
        (tmp_path / "go").touch()
        await held
        assert (await asyncio.wait_for(gang, 60))[0].value[1] == 3.0
