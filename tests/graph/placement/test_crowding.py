"""The slowdown of cores by each other, measured beside real processes, which end with the measurement."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from hydra_tune.graph import profile as profiles
from hydra_tune.graph.placement import crowding as crowds
from hydra_tune.graph.placement.crowding import company, measured_crowding
from hydra_tune.strategies.shard.prepare import examine
from hydra_tune.training.loop import Training
from tests.fault.searches import wait_for
from tests.strategies.shard.models import CPU, SEED, candidate


def others() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if "numpy" in " ".join(each.cmdline())]


def worked() -> float:
    return sum(sum(each.cpu_times()[:2]) for each in others())


def all_work() -> None:
    before = worked()
    wait_for(lambda: worked() > before + 0.2, "work of the others")


def test_it_is_measured_beside_processes_that_end_with_it() -> None:
    assert measured_crowding(1) == 1.0
    assert 1.0 <= measured_crowding(2, turns=2) < 100
    assert others() == []


def test_more_devices_than_cores_take_turns_on_these(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowds, "cores", lambda: 1)
    assert measured_crowding(3) == 3.0


def test_the_others_work_beside_every_second_turn_and_sleep_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []

    def work() -> float:
        turns.append("beside" if turns and turns[-1] == "alone" else "alone")
        if turns[-1] == "beside":
            all_work()
        else:
            wait_for(lambda: {each.status() for each in others()} == {psutil.STATUS_SLEEPING}, "sleep of the others")
        return 1.0

    plain = crowds._compared
    monkeypatch.setattr(crowds, "cores", lambda: 3)
    monkeypatch.setattr(crowds, "_compared", lambda others: (turns.clear(), plain(others))[1])
    monkeypatch.setattr(crowds, "_work", work)
    assert measured_crowding(3, turns=2) == 1.0
    assert turns == ["alone", "beside"]


def test_company_works_to_the_end_and_has_a_core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowds, "cores", lambda: 3)
    with company(7):
        assert len(others()) == 2
        all_work()
        all_work()
    assert others() == []
    with company(0):
        assert others() == []


def test_company_that_cannot_come_costs_no_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowds, "cores", lambda: 2)
    monkeypatch.setattr(crowds, "_OTHER", "raise SystemExit(3)")
    before = psutil.Process().children()
    with company(1) as there:
        assert not there
    assert psutil.Process().children() == before
    made = candidate("mlp")
    examine(Training(made, made.train, made.valid, SEED, CPU), tmp_path, beside=1)
    assert list(tmp_path.glob("*.json")) == [], "what was timed alone is not kept as if it had company"


def test_company_ends_even_where_somebody_else_holds_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowds, "cores", lambda: 2)
    with company(1) as there:
        assert there
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
    ended = others() == []
    alive = psutil.pid_exists(child)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert ended
    assert alive, "leaving did not wait for it"


def test_a_pilot_beside_others_is_timed_while_they_work_and_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(SEED)
    made = candidate("mlp")
    training = Training(made, made.train, made.valid, SEED, CPU)
    timed: list[int] = []
    counting: list[int] = []
    timing, counted = profiles._timed, profiles._owners

    def timed_run(*args: Any) -> Any:
        timed.append(len(others()))
        if others():
            all_work()
        return timing(*args)

    def owners(*args: Any) -> Any:
        counting.append(len(others()))
        return counted(*args)

    monkeypatch.setattr(crowds, "cores", lambda: 2)
    monkeypatch.setattr(profiles, "_timed", timed_run)
    monkeypatch.setattr(profiles, "_owners", owners)
    for beside in (0, 1, 1, 0):
        examine(training, tmp_path, beside=beside)
    assert timed == [0, 1]
    assert counting == [0, 0], "nobody is kept from work by what is not timed"
