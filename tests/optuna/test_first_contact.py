"""An Optuna user's first commands: mistakes in the file are one line, and the output suits objectives."""

from __future__ import annotations

import json
from pathlib import Path

import optuna
import pytest

import hydra_tune as ht
from hydra_tune.cli.app import run

FLAGS = ["--n-trials", "2", "--devices", "1xcpu"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "def objective(trial):\n    return 1 +\n",
            "the build function cannot be imported: SyntaxError: invalid syntax",
        ),
        ("import no_such_package\n", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("from math import no_such_name\n", "ImportError: cannot import name 'no_such_name'"),
        ("def objektive(trial):\n    return 1.0\n", "has no function 'objective' (did you mean 'objektive'"),
        ("x = 1 / 0\ndef objective(trial):\n    return 1.0\n", "ZeroDivisionError: division by zero at "),
        ("import sys\nsys.exit(7)\n", "the build function cannot be imported: SystemExit: 7"),
        ("import os\nos._exit(9)\n", "the build function cannot be imported: "),
    ],
)
def test_a_mistake_in_the_file_is_one_line_and_leaves_no_study(
    text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("obj.py").write_text(text)
    assert run(["search", "obj.py:objective", *FLAGS, "--quiet"]) == 2
    (line,) = [each for each in capsys.readouterr().err.splitlines() if each.startswith("error: ")]
    assert said in line
    assert not Path("hydra_tune.db").exists()


@pytest.mark.parametrize(
    ("text", "suggested"),
    [
        ("def load(path):\n    pass\ndef objective(trial):\n    return 1.0\n", "give obj.py:objective"),
        ("def load(path):\n    pass\ndef train(trial):\n    return 1.0\n", "give obj.py:train"),
        ("x = 1\n", "give obj.py:function"),
        ("def f(:\n", "the file cannot be read (invalid syntax"),
    ],
)
def test_a_file_without_a_function_gets_a_suggestion(
    text: str, suggested: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("obj.py").write_text(text)
    assert run(["search", "obj.py", *FLAGS]) == 2
    assert suggested in capsys.readouterr().err


OBJECTIVE = """
import argparse
import time

arguments = argparse.ArgumentParser().parse_args()
time.sleep(0.6)
seen = []
cache = {}


def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    seen.append(x)
    cache[x] = x
    for step in range(3):
        trial.report(x + step, step)
    trial.set_user_attr("colour", "green")
    return x
"""


def test_what_is_shown_of_an_objective(capsys: pytest.CaptureFixture[str]) -> None:
    """One search, looked at by every command."""
    Path("obj.py").write_text(OBJECTIVE)
    # The file takes longer to import than the time limit, which counts from the first trial.
    flags = ["--study", "s", *FLAGS, "--direction", "maximize", "--timeout", "0.5"]
    assert run(["search", "obj.py:objective", *flags, "--concurrency", "1"]) == 0
    shown = capsys.readouterr()
    trials = len([line for line in shown.err.splitlines() if "COMPLETE value=" in line])
    assert trials
    assert "least possible" not in shown.err
    assert shown.err.count("note: the objective changed 'seen', a list outside of it") == 1
    header = next(line for line in shown.out.splitlines() if line.startswith("trial"))
    assert header.split() == ["trial", "value", "state", "seconds", "parameters"]
    assert "export:" not in shown.out

    assert run(["show", "s", "0"]) == 0
    shown = capsys.readouterr()
    assert "colour: green" in shown.out
    assert "strategy" not in shown.out
    assert "shards" not in shown.out
    assert "build" not in shown.out
    assert [line.split()[0] for line in shown.out.splitlines() if "reported" in line] == ["step"]
    assert run(["show", "s", "0", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [point["reported"] - document["value"] for point in document["metrics"].values()] == pytest.approx([0, 1, 2])
    assert run(["export", "s", "--to", "out"]) == 2
    assert "an objective that returns a number has no model" in capsys.readouterr().err

    assert run(["resume", "s", "--trials", "1"]) == 0
    said = capsys.readouterr().err
    assert f"nothing is left to do: the study has {trials} trials, and trials=1 is the total" in said
    assert f"for 10 more give trials={trials + 10}, or n_trials=10" in said
    assert run(["resume", "s", "--n-trials", "2", "--quiet", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["trials"]) == trials + 2


def test_one_file_runs_under_optuna_and_in_a_search() -> None:
    def objective(trial: optuna.Trial) -> float:
        trial = ht.extended(trial)
        x = trial.suggest_float("x", 0, 1)
        trial.metrics(0, {"twice": 2 * x})
        trial.set_user_attr("checkpoints", trial.checkpoints is not None)
        return float("nan") if trial.stopping() else x

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    study.optimize(objective, n_trials=1)
    optuna.logging.set_verbosity(optuna.logging.INFO)
    assert study.best_trial.user_attrs == {"checkpoints": False}
    result = ht.search(objective, n_trials=1, devices="1xcpu", progress=False)
    assert result.study.best_trial.user_attrs == {"checkpoints": True}
