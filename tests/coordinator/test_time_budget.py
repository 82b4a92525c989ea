"""Searches that end at their timeout with the epochs that trials have, and searches with enqueued trials."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import hydra_tune as ht
from hydra_tune.coordinator.attempt import Attempt
from hydra_tune.coordinator.limits import Limits
from hydra_tune.coordinator.result import SearchResult
from tests.candidates import small_candidate

ENDLESS_EPOCHS = 10**6


def build_endless(trial: Any) -> ht.Candidate:
    return small_candidate(lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True), epochs=ENDLESS_EPOCHS, keep="best")


def build_endless_last(trial: Any) -> ht.Candidate:
    return small_candidate(lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True), epochs=ENDLESS_EPOCHS)


def build_with_choices(trial: Any) -> float:
    return float(trial.suggest_float("x", 0, 10)) + (trial.suggest_categorical("kind", ["a", "b"]) == "b")


def reported(result: SearchResult, number: int) -> list[float]:
    return list(result.study.trials[number].intermediate_values.values())


@pytest.fixture
def timeout_after_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a timeout come when two trials have reported two epochs each, however long that takes."""
    reports: Counter[int] = Counter()
    report = Attempt.report

    async def counted(run: Attempt, *arguments: Any) -> None:
        await report(run, *arguments)
        reports[run.number] += 1

    monkeypatch.setattr(Attempt, "report", counted)
    monkeypatch.setattr(Limits, "out_of_time", lambda _: sum(count >= 2 for count in reports.values()) >= 2)


@pytest.mark.parametrize(("build", "best"), [(build_endless, True), (build_endless_last, False)])
@pytest.mark.usefixtures("timeout_after_epochs")
def test_running_trials_end_at_the_timeout_with_the_epochs_they_have(build: Any, best: bool) -> None:
    result = ht.search(
        build, trials=50, timeout=10**6, stop_at_timeout=True, devices="2xcpu", seed=1, progress=False, strategy="whole"
    )  # fmt: skip
    ended = [record for record in result.trials if record.state == "COMPLETE"]
    assert 1 <= len(result.trials) <= 4
    assert ended
    for record in ended:
        values = reported(result, record.number)
        assert 0 < len(values) < ENDLESS_EPOCHS
        assert record.value == (min(values) if best else values[-1])
    model = result.best_model().eval()
    data = small_candidate().valid
    loss = small_candidate().loss(model(data.tensors[0]), data.tensors[1])
    assert float(loss.detach()) == pytest.approx(result.best_value)


def test_a_timeout_is_needed_to_stop_at_it() -> None:
    with pytest.raises(ht.InputError, match="needs a timeout"):
        ht.search(build_endless, trials=1, stop_at_timeout=True)


@pytest.mark.smoke
def test_parameters_to_try_first() -> None:
    first = [{"x": 3.0, "kind": "b"}, {"x": 1.5}]
    result = ht.search(
        build_with_choices, trials=4, enqueue=first, study="s", devices="2xcpu", seed=0, progress=False
    )  # fmt: skip
    assert result.trials[0].params == {"x": 3.0, "kind": "b"}
    assert result.trials[1].params["x"] == 1.5
    more = ht.search(
        build_with_choices, trials=6, enqueue=first, study="s", resume=True, devices="2xcpu", progress=False
    )  # fmt: skip
    assert [record.params["x"] for record in more.trials].count(3.0) == 1
    with pytest.raises(ht.InputError, match="enqueue cannot be"):
        ht.search(build_with_choices, trials=1, enqueue={"x": 1})  # type: ignore[arg-type]
