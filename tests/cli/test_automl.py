"""`fit`, `predict` and `leaderboard` as real commands."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from hydra_tune.cli.app import run
from tests.automl.tables import line

Command = Callable[..., subprocess.CompletedProcess[str]]


def test_fit_leaderboard_and_predict(hydra_tune: Command, tmp_path: Path) -> None:
    line().to_csv(tmp_path / "t.csv", index=False)
    done = hydra_tune("fit", "t.csv", "--target", "y", "--trials", "2", "--families", "linear", "--seed", "1")
    assert done.returncode == 0, done.stderr
    assert "regression of 'y' from 2 columns, 80 rows, 8 folds; judged by rmse (less is better)" in done.stderr
    assert "linear-0" in done.stdout
    assert "predict t-model TABLE" in done.stdout
    board = json.loads(hydra_tune("leaderboard", "t-model", "--importance", "--json").stdout)
    assert {each["column"] for each in board["importance"]} == {"a", "b"}
    assert (board["task"], board["metric"]) == ("regression", "rmse")
    assert {"model", "score", "fit_seconds", "predict_seconds", "size_bytes", "strategy"} <= set(board["models"][0])
    done = hydra_tune("predict", "t-model", "t.csv", "--to", "p.csv")
    assert (done.returncode, done.stdout) == (0, "80 predictions: p.csv\n")
    assert abs(pd.read_csv(tmp_path / "p.csv")["y"] - line()["y"]).max() < 2
    assert json.loads(hydra_tune("predict", "t-model", "t.csv", "--evaluate", "--json").stdout)["r2"] > 0.95
    extra = line().assign(z=1).drop(columns="y")
    extra.to_csv(tmp_path / "extra.csv", index=False)
    done = hydra_tune("predict", "t-model", "extra.csv")
    assert done.returncode == 0
    assert "warning: columns that the model does not know are not used: 'z'" in done.stderr


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("fit", "absent.csv", "--target", "y"), "there is no file 'absent.csv'"),
        (("fit", "t.csv", "--target", "z"), "has no column 'z'"),
        (("fit", "t.csv", "--target", "y", "--time", "soon"), "time cannot be 'soon'"),
        (("fit", "t.csv", "--target", "y", "--trials", "0"), "trials cannot be 0"),
        (("fit", "t.csv", "--target", "y", "--task", "guess"), "task cannot be 'guess'"),
        (("fit", "t.csv", "--target", "y", "--metric", "auc"), "has no metric 'auc'"),
        (("fit", "t.csv", "--target", "y", "--folds", "0"), "folds cannot be 0"),
        (("fit", "t.csv", "--target", "y", "--families", "trees"), "no model family 'trees'"),
        (("fit", "t.csv", "--target", "y", "--to", "t.csv"), "is a file"),
        (("fit", "t.csv", "--target", "y", "--devices", "3xtpu"), "3xtpu"),
        (("predict", "nowhere", "t.csv"), "holds no predictor"),
        (("predict", "nowhere", "t.csv", "--to", "p.xls"), "cannot go to 'p.xls'"),
        (("leaderboard", "nowhere"), "holds no predictor"),
    ],
)
def test_bad_input_gets_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str) -> None:
    line().to_csv("t.csv", index=False)
    assert run(list(arguments)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert says in printed.err
    assert printed.err.count("\n") == 1
    assert {path.name for path in Path.cwd().iterdir()} == {"t.csv"}
