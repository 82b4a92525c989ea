"""Mistakes of user code in a trial: one clear reason, and the other trials continue."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import hydra_tune as ht
from tests.candidates import rows, small_candidate
from tests.fault.searches import run


def outcomes(build: Any, trials: int, **options: Any) -> list[tuple[str, str]]:
    options = {"devices": "2xcpu", "study": "faulty", "progress": False, "seed": 0} | options
    try:
        result = ht.search(build, trials=trials, **options)
    except ht.SearchFailed:
        result = ht.SearchResult("sqlite:///hydra_tune.db", "faulty")
    return [(record.state, record.error or "") for record in result.trials]


VALUES: dict[str, Any] = {
    "'oops'": "oops", "None": None, "[1.0, 2.0]": [1.0, 2.0], "inf": 1e400, "nan": float("nan"), "{'a': 1}": {"a": 1},
    "tensor of shape (2,)": torch.zeros(2),
}  # fmt: skip


def test_an_objectives_value_that_is_no_number_fails_the_trial_with_the_value_quoted() -> None:
    refused = [shown for shown in VALUES if shown != "inf"]  # which Optuna takes from an objective
    wrong = [VALUES[shown] for shown in refused]

    def objective(trial: Any) -> Any:
        return wrong[trial.number] if trial.number < len(wrong) else 1.0

    seen = outcomes(objective, len(wrong) + 2)
    for (state, error), shown in zip(seen, refused, strict=False):
        assert state == "FAILED"
        assert shown in error
        assert "return one number that is not NaN" in error
    assert [state for state, _ in seen[-2:]] == ["COMPLETE"] * 2


def test_a_metric_that_is_no_number_or_is_missing_fails_the_trial() -> None:
    wrong = list(VALUES.values())

    def build(trial: Any) -> ht.Candidate:
        if trial.number == len(wrong):
            return small_candidate(metrics={"acuracy": lambda o, t: 1.0})
        value = wrong[trial.number] if trial.number < len(wrong) else 0.5
        return small_candidate(metrics={"accuracy": lambda o, t: value}, epochs=1)

    seen = outcomes(build, len(wrong) + 2, metric="accuracy")
    for (state, error), shown in zip(seen, VALUES, strict=False):
        assert state == "FAILED"
        assert f"metric 'accuracy' is {'a ' if 'tensor' in shown else ''}{shown}" in error
    assert seen[len(wrong)][0] == "FAILED"
    assert "no metric 'accuracy' (did you mean 'acuracy'?" in seen[len(wrong)][1]
    assert seen[-1][0] == "COMPLETE"


def test_a_loss_that_is_no_number_any_more_stops_before_the_update() -> None:
    def build(trial: Any) -> ht.Candidate:
        calls = []

        def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            calls.append(0)
            good = torch.nn.functional.cross_entropy(outputs, targets)
            return good * float("nan") if trial.number == 0 and len(calls) == 6 else good

        return small_candidate(loss=loss)

    seen = outcomes(build, 2)
    assert seen[0] == ("DIVERGED", "the training loss became nan at step 5")
    assert seen[1][0] == "COMPLETE"
    import optuna

    with ht_storage() as storage:
        study = optuna.load_study(study_name="faulty", storage=storage)
        assert study.trials[0].state is optuna.trial.TrialState.PRUNED


def ht_storage() -> Any:
    from hydra_tune.storage import open_storage

    return open_storage("sqlite:///hydra_tune.db", read_only=True)


def test_a_build_that_always_raises_stops_the_search_early(capsys: pytest.CaptureFixture[str]) -> None:
    def build(trial: Any) -> Any:
        raise RuntimeError("no such column: prize")

    with pytest.raises(ht.SearchFailed, match="failed alike: RuntimeError: no such column: prize"):
        ht.search(build, trials=100, devices="2xcpu", study="faulty", progress=True)
    shown = capsys.readouterr().err
    assert shown.count("Traceback (most recent call last)") == 1
    with ht_storage() as storage:
        from hydra_tune.storage.queries import trial_attempts, trial_records

        assert 5 <= len(trial_records(storage, "faulty")) <= 7
        assert "no such column: prize" in trial_attempts(storage, "faulty", 0)[0].traceback


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import nothing_like_this\n", "ModuleNotFoundError: No module named 'nothing_like_this'"),
        ("def build(trial:\n", "SyntaxError: '(' was never closed"),
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_cannot_be_imported_is_shown_once(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "broken.py").write_text(text)
    done = run("search", "broken.py:build", "--trials", "50", "--devices", "2xcpu", folder=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"cannot be imported: {said}" in line
    assert not list(tmp_path.glob("*.db")), "no study was made"


def test_a_build_that_raises_sometimes_costs_only_those_trials() -> None:
    def build(trial: Any) -> float:
        if trial.number % 2:
            raise ZeroDivisionError("odd")
        return trial.suggest_float("x", 0, 1)

    seen = outcomes(build, 12)
    assert [state for state, _ in seen] == ["COMPLETE", "FAILED"] * 6
    assert seen[1][1] == "ZeroDivisionError: odd"


def ragged() -> list[Any]:
    return [(torch.zeros(i + 1), 0) for i in range(30)]


def poisoned() -> TensorDataset:
    inputs = rows().tensors[0].clone()
    inputs[17, 2] = float("nan")
    return TensorDataset(inputs, rows().tensors[1])


DATA: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({"train": rows(0)}, "Candidate.train has no rows"),
    "empty validation": ({"valid": rows(0)}, "Candidate.valid has no rows"),
    "ragged": ({"train": ragged}, "equal shapes, or collate must pad"),
    "nan": ({"train": poisoned}, "Candidate.train has NaN or infinite values (row 17)"),
    "not a dataset": ({"train": lambda: 7}, "map-style dataset"),
    "dropped": ({"train": rows(5), "batch_size": 10, "drop_last": True}, "5 rows, less than one batch of 10"),
}


def test_data_that_cannot_be_trained_on_is_refused_before_training() -> None:
    cases = list(DATA.values())

    def build(trial: Any) -> ht.Candidate:
        fields = cases[trial.number][0] if trial.number < len(cases) else {"train": rows(1), "batch_size": 1}
        return small_candidate(**fields, model=torch.nn.Linear(6, 3).double(), epochs=1)

    seen = outcomes(build, len(cases) + 1)
    for (state, error), (_, expected) in zip(seen, cases, strict=False):
        assert state == "FAILED"
        assert expected in error
    assert seen[-1][0] == "COMPLETE", "one row is enough"


def test_a_killed_worker_costs_one_retry() -> None:
    def build(trial: Any) -> float:
        from pathlib import Path

        mark = Path(f"killed-{trial.number}")
        x = trial.suggest_float("x", 0, 1)
        if trial.number == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if trial.number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    seen = outcomes(build, 4, concurrency=1)
    assert [state for state, _ in seen] == ["COMPLETE", "COMPLETE", "LOST", "COMPLETE"]
    assert "was killed (signal 9), probably out of host memory: it had taken " in seen[2][1]
