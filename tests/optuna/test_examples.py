"""Objectives in the shape of Optuna's examples, run by the command line as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hydra_tune.cli.app import run
from tests.optuna import examples

FILE = examples.__file__
MAXIMIZE = ["--direction", "maximize"]
EXAMPLES: dict[str, list[str]] = {
    "quadratic": ["--sampler", "cmaes"],
    "sklearn_simple": MAXIMIZE,
    "sklearn_pruned": ["--pruner", "{name: median, n_startup_trials: 1}"],
    "boosted": [*MAXIMIZE, "--sampler", "{name: tpe, multivariate: true}"],
    "torch_layers": [*MAXIMIZE, "--pruner", "SuccessiveHalvingPruner"],
    "two_objectives": ["--direction", "minimize", "--direction", "minimize", "--sampler", "nsgaii"],
    "constrained": ["--sampler", "auto"],
    "cross_validated": [*MAXIMIZE, "--sampler", "{name: grid, search_space: {max_depth: [2, 4, 6]}}"],
    "with_artifact": [],
    "shifted": ["--sampler", "random", "--seed", "3"],
    "stops_when_good": ["--n-trials", "50"],
    "goes_on_from_the_best": ["--sampler", f"{{name: '{FILE}:SimulatedAnnealing', temperature: 5.0}}"],
    "lightgbm_pruned": [*MAXIMIZE, "--pruner", "hyperband"],
    "xgboost_pruned": MAXIMIZE,
    "search_cv": MAXIMIZE,
    "lightning": MAXIMIZE,
    "ignite": MAXIMIZE,
    "skorch": MAXIMIZE,
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = EXAMPLES[name] if "--n-trials" in EXAMPLES[name] else ["--n-trials", "3", *EXAMPLES[name]]
    assert run(["search", f"{FILE}:{name}", "--study", "s", "--devices", "1xcpu", "--quiet", "--json", *flags]) == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    assert [trial["state"] for trial in trials if trial["error"]] == []
    assert len(trials) == 3
    assert {trial["state"] for trial in trials} <= {"COMPLETE", "PRUNED"}
    if name == "with_artifact":
        kept = [Path("artifacts", trial["user_attrs"]["artifact_id"]).read_text() for trial in trials]
        assert kept == ["trial 0", "trial 1", "trial 2"]
    if name == "two_objectives":
        assert all(len(trial["values"]) == 2 for trial in trials)
    if name == "goes_on_from_the_best":
        centres = [trial["user_attrs"]["centre"] for trial in trials]
        assert centres[:2] == [0.0, trials[0]["params"]["x"]]
