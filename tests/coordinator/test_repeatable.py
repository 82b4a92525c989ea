"""Samplers that learn: a search that was stopped or killed proposes the same parameters as an unbroken one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import hydra_tune as ht
from tests.fault.searches import kill_and_reap, run, started, values, wait_for

FLAGS = ["--trials", "20", "--devices", "1xcpu", "--seed", "3", "--study", "s"]
OBJECTIVE = """
import os, time

def objective(trial):
    x = trial.suggest_float("x", -1, 1)
    if trial.number == 14 and os.path.exists("pause"):
        open("paused", "w").close()
        time.sleep(1000)
    n = trial.suggest_int("n", 1, 64, log=True)
    kind = trial.suggest_categorical("kind", ["a", "b", "c"])
    return (x - 0.3) ** 2 + n / 64 + (kind == "b")
"""


def objective(trial: Any) -> float:
    x, y = trial.suggest_float("x", -1, 1), trial.suggest_float("y", -1, 1)
    return float((x - 0.3) ** 2 + (y + 0.1) ** 2)


def proposed(study: str, sampler: str, totals: list[int]) -> list[dict[str, Any]]:
    options: dict[str, Any] = {"sampler": sampler, "seed": 3, "devices": "1xcpu", "study": study, "progress": False}
    for part, total in enumerate(totals):
        result = ht.search(objective, trials=total, resume=part > 0, **options)
        params = [record.params for record in result.trials]
        result.close()
    return params


@pytest.mark.parametrize("sampler", ["tpe", "cmaes", "nsgaii", "random", "qmc"])
def test_a_study_in_parts_proposes_what_one_in_a_piece_does(sampler: str) -> None:
    whole = proposed("whole", sampler, [26])
    assert proposed("parts", sampler, [5, 13, 14, 26]) == whole
    assert len({params["x"] for params in whole}) == 26, "no proposal is made twice"


def test_a_killed_tpe_search_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """Killed within a trial, after one of its parameters was proposed."""
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    for folder in (unbroken, broken):
        folder.mkdir()
        (folder / "o.py").write_text(OBJECTIVE)
    assert run("search", "o.py:objective", *FLAGS, "--sampler", "tpe", folder=unbroken).returncode == 0
    (broken / "pause").touch()
    with started("search", "o.py:objective", *FLAGS, "--sampler", "tpe", folder=broken) as search:
        wait_for((broken / "paused").exists, "the fifteenth trial")
        kill_and_reap(search)
    (broken / "pause").unlink()
    assert run("resume", "s", folder=broken).returncode == 0
    assert values(broken, "s") == values(unbroken, "s")
