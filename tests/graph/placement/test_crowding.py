"""How cores disturb each other: measured beside real processes, and kept."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from hydra_tune.graph.placement import crowding as crowds
from hydra_tune.graph.placement.crowding import crowding, measured_crowding
from tests.fault.searches import wait_for


def test_it_is_measured_beside_processes_that_end_with_it() -> None:
    assert measured_crowding(1) == 1.0
    assert 1.0 <= measured_crowding(2, turns=2) < 100
    assert [each for each in psutil.Process().children() if "numpy" in " ".join(each.cmdline())] == []


def test_the_others_work_beside_every_second_turn_and_sleep_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []

    def worked() -> float:
        return sum(sum(each.cpu_times()[:2]) for each in psutil.Process().children())

    def work() -> float:
        turns.append("beside" if turns and turns[-1] == "alone" else "alone")
        others = psutil.Process().children()
        if turns[-1] == "beside":
            before = worked()
            wait_for(lambda: worked() > before + 0.2, "work of the others")
        else:
            wait_for(lambda: {each.status() for each in others} == {psutil.STATUS_SLEEPING}, "sleep of the others")
        return 1.0

    plain = crowds._compared
    monkeypatch.setattr(crowds, "cores", lambda: 3)
    monkeypatch.setattr(crowds, "_compared", lambda others: (turns.clear(), plain(others))[1])
    monkeypatch.setattr(crowds, "_work", work)
    assert measured_crowding(3, turns=2) == 1.0
    assert turns == ["alone", "beside"]


def test_it_is_measured_once_for_a_number_of_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(crowds, "measured_crowding", lambda devices: asked.append(devices) or 1.25)
    cache = tmp_path / "kept"
    assert [crowding(cache, 2), crowding(cache, 2), crowding(cache, 3)] == [1.25, 1.25, 1.25]
    assert asked == [2, 3]
    for broken in ("", "[]", '{"format": 1}', '{"format": 0, "factor": 1.5}', '{"format": 1, "factor": "much"}'):
        for kept in cache.iterdir():
            kept.write_text(broken)
        assert crowding(cache, 2) == 1.25
    assert len(asked) == 7


def test_a_measurement_that_fails_costs_no_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowds, "_OTHER", "raise SystemExit(3)")
    assert crowding(tmp_path, 2) == 1.0
    assert list(tmp_path.iterdir()) == [], "it is measured again next time"


def test_more_devices_than_cores_take_turns_on_these(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowds, "cores", lambda: 1)
    assert measured_crowding(3) == 3.0
