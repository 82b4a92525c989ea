"""Objectives that report ten thousands of times: bounded memory, no quadratic work, and all of it recorded."""

from __future__ import annotations

import time
from typing import Any

import pytest

import hydra_tune as ht
from hydra_tune.coordinator.study import OwnedStudy
from hydra_tune.coordinator.study_thread import StudyThread
from hydra_tune.training.trial_line import CALLS_AHEAD


def reporting(times: int) -> Any:
    def objective(trial: Any) -> float:
        for step in range(times):
            trial.report(float(step), step)
        return 1.0

    return objective


def test_an_objective_is_slowed_down_to_the_pace_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    report, answer, waiting = OwnedStudy._report, StudyThread.answer, []

    def slow_report(self: Any, *args: Any) -> None:
        time.sleep(0.001)  # slower than an objective that does nothing else
        report(self, *args)

    def counted(self: Any, *args: Any) -> None:
        waiting.append(self._work.qsize())
        answer(self, *args)

    monkeypatch.setattr(OwnedStudy, "_report", slow_report)
    monkeypatch.setattr(StudyThread, "answer", counted)
    result = ht.search(reporting(3000), trials=1, devices="1xcpu", study="s", progress=False)
    assert len(result.study.trials[0].intermediate_values) == 3000
    assert max(waiting) <= CALLS_AHEAD + 5
    result.close()


def test_a_report_does_not_copy_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    report, seen = OwnedStudy._report, set()

    def noted(self: Any, trial: Any, value: float, step: int) -> None:
        report(self, trial, value, step)
        seen.add(id(self.storage._trial(trial._trial_id)[1].intermediate_values))

    monkeypatch.setattr(OwnedStudy, "_report", noted)
    result = ht.search(reporting(500), trials=1, devices="1xcpu", study="s", progress=False)
    assert len(seen) == 1
    assert result.study.trials[0].intermediate_values == {step: float(step) for step in range(500)}
    result.close()
