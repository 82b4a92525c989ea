"""How cores disturb each other: measured beside real processes, and kept."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from hydra_tune.graph.placement import crowding as crowds
from hydra_tune.graph.placement.crowding import crowding, measured_crowding


def test_it_is_measured_beside_processes_that_end_with_it() -> None:
    assert measured_crowding(1) == 1.0
    assert 1.0 <= measured_crowding(3, turns=2) < 100
    assert [each for each in psutil.Process().children() if "numpy" in " ".join(each.cmdline())] == []


def test_the_others_work_while_this_process_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what the kernel counts for them, not by the clock: two turns of two others, each twice as long as ours."""
    worked: list[float] = []
    plain = crowds._compared

    def compared(others: list[crowds._Other]) -> float:
        mine = psutil.Process().children()
        before = sum(each.cpu_times().user for each in mine)
        found = plain(others)
        worked.append(sum(each.cpu_times().user for each in mine) - before)
        return found

    monkeypatch.setattr(crowds, "SECONDS", 0.2)
    monkeypatch.setattr(crowds, "_compared", compared)
    measured_crowding(3, turns=2)
    assert len(worked) == 2
    assert all(seconds > 0.1 for seconds in worked)


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
