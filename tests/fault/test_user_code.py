"""User code that forks, starts threads, floods or raises odd exceptions: the search continues."""

from __future__ import annotations

import enum
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from torch.utils.data import TensorDataset

import hydra_tune as ht
from hydra_tune.cli.app import run
from tests.candidates import small_candidate
from tests.fault.searches import outcomes


class Choice(enum.Enum):
    A = 1
    B = 2


class Odd(Exception):
    data = 5

    def __str__(self) -> str:
        raise RuntimeError("no message for you")


class SilentEnd(optuna.TrialPruned):
    pass


def raise_(error: BaseException) -> None:
    raise error


ODDITIES: list[tuple[Any, str, str]] = [
    (lambda trial: trial.suggest_categorical("c", [Choice.A, Choice.B]).value, "COMPLETE", ""),
    (lambda trial: trial.suggest_categorical("d", [Choice.A]), "FAILED", "returned is <Choice.A: 1>"),
    (lambda trial: trial.set_user_attr("s", {1, 2}), "FAILED", "not JSON serializable"),
    (lambda trial: trial.report(1.0, 2**31), "FAILED", "report needs a step of at most 2147483647, not 2147483648"),
    (lambda trial: trial.report(1.0, 10**20), "FAILED", "report needs a step of at most"),
    (lambda trial: raise_(Odd()), "FAILED", "Odd (its message cannot be shown: RuntimeError)"),
    (lambda trial: raise_(KeyboardInterrupt()), "FAILED", "KeyboardInterrupt"),
    (lambda trial: raise_(GeneratorExit()), "FAILED", "GeneratorExit"),
    (lambda trial: raise_(SilentEnd()), "PRUNED", ""),
    (lambda trial: len(trial.study.trials), "COMPLETE", ""),
    (lambda trial: trial.study, "FAILED", "the value that the objective returned is <"),
    (lambda trial: trial.suggest_float("x", np.float32(0), np.int64(2)), "COMPLETE", ""),
    (lambda trial: np.float32(0.5), "COMPLETE", ""),
    (lambda trial: torch.tensor(0.5), "COMPLETE", ""),
    (lambda trial: True, "COMPLETE", ""),
    (lambda trial: (trial.report(float("nan"), 0), 1.0)[1], "COMPLETE", ""),
]


def test_odd_values_and_exceptions_end_their_own_trial_only() -> None:
    work = [oddity for oddity, _, _ in ODDITIES]
    seen = outcomes(lambda trial: work[trial.number](trial), len(work))
    for (state, error), (_, expected, said) in zip(seen, ODDITIES, strict=True):
        assert state == expected, error
        assert said in error


def test_a_child_that_outlives_its_worker_does_not_hold_the_search_up() -> None:
    def forking(trial: Any) -> float:
        if trial.number == 0 and os.fork() == 0:
            signal.pause()
        if trial.number == 1:
            os._exit(1)
        return trial.suggest_float("x", 0, 1)

    seen = outcomes(forking, 3)
    assert [state for state, _ in seen] == ["COMPLETE", "LOST", "COMPLETE"]
    assert "exited with code 1" in seen[1][1]


def test_a_thread_left_behind_speaks_for_its_own_trial_or_not_at_all() -> None:
    def threading_objective(trial: Any) -> float:
        def late() -> None:
            while not os.path.exists("go"):
                time.sleep(0.01)
            trial.report(999.0, 77)

        if trial.number == 0:
            threading.Thread(target=late, daemon=True).start()
        else:
            Path("go").touch()
            time.sleep(0.5)
        return trial.suggest_float("x", 0, 1)

    result = ht.search(threading_objective, trials=2, devices="1xcpu", progress=False)
    assert [trial.intermediate_values for trial in result.study.trials] == [{}, {}]


def test_a_flood_of_output_without_a_line_end_is_borne() -> None:
    def flooding(trial: Any) -> float:
        for _ in range(200):
            os.write(1, b"x" * 65536)
        return 1.0

    assert outcomes(flooding, 1) == [("COMPLETE", "")]


def test_a_search_whose_trials_all_crash_gives_up_and_says_so() -> None:
    with pytest.raises(ht.SearchFailed, match=r"the first \d trials failed alike: .* exited with code 3"):
        ht.search(lambda trial: os._exit(3), trials=50, devices="2xcpu", progress=False)


def mark(trial: Any) -> ht.Candidate:
    """The optimizer reads an attribute of a parameter, as weight-decay rules do."""
    trial.suggest_float("x", 0, 1)
    candidate = small_candidate(epochs=1)
    for parameter in candidate.model.parameters():
        parameter.no_decay = parameter.ndim == 1

    def optimizer(params: Any) -> torch.optim.Optimizer:
        assert any(getattr(p, "no_decay", False) for p in params)
        return torch.optim.SGD(params, lr=0.1)

    return small_candidate(epochs=1, model=candidate.model, optimizer=optimizer)


def test_attributes_of_parameters_travel_with_the_candidate() -> None:
    assert [state for state, _ in outcomes(mark, 3)] == ["COMPLETE"] * 3


def test_a_buffer_that_user_code_refills_is_sent_anew() -> None:
    buffer = np.zeros((40, 6))

    def level(trial: Any) -> ht.Candidate:
        trial.suggest_float("x", 0, 1)
        buffer[:] = trial.number
        data = TensorDataset(torch.from_numpy(buffer), torch.from_numpy(buffer[:, 0].copy()))
        return small_candidate(
            model=Pass(), optimizer=partial(torch.optim.SGD, lr=0.0), train=data, valid=data, epochs=1,
            loss=lambda o, t: o.mean(), metrics={"level": lambda o, t: o.mean().item()},
        )  # fmt: skip

    result = ht.search(level, trials=3, devices="1xcpu", metric="level", progress=False)
    assert [record.value for record in result.trials] == [0.0, 1.0, 2.0]


class Pass(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_modules_beside_a_file_and_in_the_current_folder_are_found() -> None:
    Path("beside.py").write_text("def value(x):\n    return x + 1\n")
    Path("spec.py").write_text(
        "import os\nfrom pathlib import Path\nfrom beside import value\n"
        "def build(trial):\n"
        "    x = trial.suggest_float('x', 0, 1)\n"
        "    mark = Path('died')\n"
        "    if trial.number == 1 and not mark.exists():\n"
        "        mark.touch(); os._exit(1)\n"
        "    return value(x)\n"
    )
    Path("queue.py").write_text("raise RuntimeError('not the queue you are looking for')\n")
    flags = ["--trials", "3", "--devices", "1xcpu", "-q", "--json"]
    assert run(["search", "spec.py:build", *flags]) == 0
    assert run(["search", "spec:build", *flags]) == 0


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("metric: 5", "metric cannot be 5"),
        ("metric: {a: b}", "metric cannot be {'a': 'b'}"),
        ("metric: acuracy", "no metric 'acuracy' (did you mean 'accuracy'?"),
        ("spill: 5", "spill cannot be 5"),
        ("strategy: [1]", "strategy cannot be 1 ("),
        ("strategy: {name: whole, foo: 1}", "strategy 'whole' has no option 'foo'"),
        ("seed: 99999999999", "seed cannot be 99999999999"),
        ("storage: 7", "storage cannot be 7"),
    ],
)
def test_wrong_types_in_a_file(capsys: pytest.CaptureFixture[str], line: str, said: str) -> None:
    Path("spec.yaml").write_text(f"space: mlp\ntrials: 1\n{line}\n")
    assert run(["search", "spec.yaml"]) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1
    assert not Path("hydra_tune.db").exists()


def test_resuming_with_another_objective_is_refused() -> None:
    def objective(trial: Any) -> float:
        return trial.suggest_float("x", 0, 1)

    ht.search(objective, trials=2, study="o", devices="1xcpu", progress=False)
    with pytest.raises(ht.SpecError, match="was started to minimize value, not to maximize value"):
        ht.search(objective, trials=3, study="o", direction="maximize", resume=True, devices="1xcpu", progress=False)


def test_a_changed_space_or_build_is_shown_as_a_difference() -> None:
    Path("b.py").write_text("def build(trial):\n    return trial.suggest_float('x', 0, 1)\n")
    flags = ["--devices", "1xcpu", "-q", "--json"]
    assert run(["search", "b.py:build", "--trials", "2", "--study", "c", *flags]) == 0
    Path("b.py").write_text("def build(trial):\n    return trial.suggest_float('x', 0, 2)\n")
    assert run(["resume", "c", "--trials", "3", "-q"]) == 2
    assert run(["resume", "c", "--trials", "3", "-q", "--allow-changes"]) == 0


@pytest.mark.parametrize("spec", ["b.py:build", "b:build"])
def test_a_changed_module_beside_the_build_is_shown_as_a_difference(
    spec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("b.py").write_text(
        "from beside import high\ndef build(trial):\n    return trial.suggest_float('x', 0, high())\n"
    )
    Path("beside.py").write_text("def high():\n    return 1\n")
    flags = ["--devices", "1xcpu", "-q", "--json"]
    assert run(["search", spec, "--trials", "1", "--study", "c", *flags]) == 0
    assert run(["resume", "c", "--trials", "2", *flags]) == 0
    Path("beside.py").write_text("def high():\n    return 2\n")
    capsys.readouterr()
    assert run(["resume", "c", "--trials", "3", *flags]) == 2
    assert "has changed: - return 1 | + return 2" in capsys.readouterr().err
    assert run(["resume", "c", "--trials", "3", "--allow-changes", *flags]) == 0


def test_a_changed_range_is_noticed_even_where_the_text_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    high = [1.0]

    class Build:
        def __call__(self, trial: Any) -> float:
            return trial.suggest_float("x", 0, high[0])

    options: dict[str, Any] = {"study": "r", "devices": "1xcpu", "progress": False}
    ht.search(Build(), trials=2, **options)
    high[0] = 2.0
    with pytest.raises(ht.SpecError, match=r"parameter 'x' was FloatDistribution\(high=1.0.* and is now .*high=2.0"):
        ht.search(Build(), trials=3, resume=True, **options)
    result = ht.search(Build(), trials=3, resume=True, allow_changes=True, **options)
    assert len(result.trials) == 3
