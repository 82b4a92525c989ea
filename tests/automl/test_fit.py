"""Fits end to end: real studies with real workers, their predictors, interruptions and resuming."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import hydra_tune as ht
from hydra_tune.storage import open_storage
from hydra_tune.storage.queries import study_summary, trial_records
from tests.automl.tables import line, mixed

ROOT = Path(__file__).parents[2]


def fit(table, target, **options):
    options = {"trials": 2, "families": ["linear"], "devices": "2xcpu", "seed": 1, "progress": False, **options}
    return ht.fit(table, target, **options)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished fit of a mixed table with a small ensemble."""
    folder = tmp_path_factory.mktemp("fitted")
    fit(
        mixed(), "bought", trials=3, families=["tabular_mlp"], to=folder / "m", folds=2, study="mixed",
        storage=f"sqlite:///{folder}/hydra_tune.db",
    )  # fmt: skip
    return folder


@pytest.mark.smoke
def test_a_regression_is_solved_and_judged_in_its_own_units() -> None:
    predictor = fit(line(), "y", to="m")
    assert (predictor.task, predictor.metric) == ("regression", "rmse")
    new = line(40, seed=9)
    scores = predictor.evaluate(new)
    assert scores["r2"] > 0.99
    assert predictor.score < 0.5
    predicted = predictor.predict(new.drop(columns="y").set_index(new.index + 100))
    assert predicted.name == "y"
    assert list(predicted.index) == list(range(100, 140))
    assert scores["rmse"] == pytest.approx(float(np.sqrt(((predicted.to_numpy() - new["y"]) ** 2).mean())))
    with pytest.raises(ht.InputError, match="no probabilities"):
        predictor.predict_proba(new)


def test_a_fit_is_a_study_and_its_predictor_needs_no_database(fitted: Path) -> None:
    with open_storage(f"sqlite:///{fitted}/hydra_tune.db", read_only=True) as storage:
        summary = study_summary(storage, "mixed")
        records = trial_records(storage, "mixed")
    assert list(summary.metrics) == ["log_loss"]
    assert len([record for record in records if record.state != "WAITING"]) == 3
    assert records[0].params["family"] == "linear"
    predictor = ht.Predictor(fitted / "m")
    board = predictor.leaderboard()
    assert any(name.startswith("linear-") for name in board["model"])
    assert board["score"].is_monotonic_decreasing
    assert set(board["strategy"]) == {"whole"}
    assert (board["fit_seconds"] > 0).all()
    assert (board["predict_seconds"] > 0).all()
    assert (board["size_bytes"] > 0).all()
    new = mixed(60, seed=7)
    assert predictor.evaluate(new)["roc_auc"] > 0.6
    shares = predictor.predict_proba(new.drop(columns="bought"))
    assert list(shares.columns) == ["no", "yes"]
    assert shares.sum(axis=1).to_numpy() == pytest.approx(1)
    assert set(predictor.predict(new)) <= {"no", "yes"}


def test_what_is_on_disk_is_json_and_safetensors(fitted: Path) -> None:
    for path in (fitted / "m").rglob("*"):
        if path.is_file():
            assert path.suffix in (".json", ".safetensors")
            assert path.read_bytes()[:1] != b"\x80"


def test_columns_that_lack_are_refused_and_extra_ones_warned_of(fitted: Path) -> None:
    predictor = ht.Predictor(fitted / "m")
    new = mixed(10)
    with pytest.raises(ht.InputError, match="lacks the column 'age'"):
        predictor.predict(new.drop(columns="age"))
    with pytest.warns(UserWarning, match="not used: 'colour'"):
        predictor.predict(new.assign(colour="red"))
    predictor.predict(new.drop(columns="same"))
    with pytest.raises(ht.InputError, match="new class 'maybe'"):
        predictor.evaluate(new.assign(bought="maybe"))
    with pytest.raises(ht.InputError, match="there is no model 'x'"):
        predictor.predict(new, model="x")
    with pytest.raises(ht.InputError, match="holds no predictor"):
        ht.Predictor(fitted)


def test_each_model_of_the_leaderboard_predicts(fitted: Path) -> None:
    predictor = ht.Predictor(fitted / "m")
    for name in predictor.leaderboard()["model"]:
        assert len(predictor.predict(mixed(10), model=name)) == 10


def test_importance_finds_what_the_target_depends_on(fitted: Path) -> None:
    predictor = ht.Predictor(fitted / "m")
    for table in (None, mixed(150, seed=3)):
        found = {each.column: each.importance for each in predictor.feature_importance(table)}
        assert set(found) == {"age", "city", "since", "said"}
        assert max(found, key=lambda name: found[name]) == "said"
        assert found["said"] > 5 * abs(found["since"])


def test_scores_are_those_of_rows_that_a_model_has_not_seen() -> None:
    """Of random labels nothing can be learned, which only a fair score shows."""
    random = np.random.default_rng(0)
    noise = pd.DataFrame(random.normal(size=(80, 60))).assign(y=random.integers(0, 2, 80))
    predictor = fit(noise, "y", to="m", folds=4)
    assert predictor.score < 0.75
    assert predictor.evaluate(noise)["roc_auc"] > 0.9


@pytest.mark.parametrize("case", ["three rows", "wide", "categories alone"])
def test_odd_tables_are_fitted(case: str) -> None:
    tables = {
        "three rows": pd.DataFrame({"a": [1.0, 2.0, 3.0], "y": ["u", "v", "v"]}),
        "wide": pd.DataFrame(np.random.default_rng(0).normal(size=(40, 500))).assign(y=[0, 1] * 20),
        "categories alone": mixed(40)[["city", "bought"]].rename(columns={"bought": "y"}),
    }
    predictor = fit(tables[case], "y", to="m")
    assert len(predictor.predict(tables[case])) == len(tables[case])


def test_images_are_fitted_and_predicted(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    np.savez(tmp_path / "digits.npz", images=images[:300].reshape(-1, 8, 8), digit=labels[:300])
    np.savez(tmp_path / "new.npz", images=images[300:400].reshape(-1, 8, 8))
    predictor = fit(tmp_path / "digits.npz", "digit", to="m", trials=2, families=["resnet"])
    assert predictor.task == "multiclass"
    assert any(name.startswith("resnet") for name in predictor.leaderboard()["model"])
    predicted = predictor.predict(tmp_path / "new.npz")
    assert (predicted.to_numpy() == labels[300:400]).mean() > 0.8
    np.savez(tmp_path / "other.npz", images=np.zeros((2, 9, 9)))
    with pytest.raises(ht.InputError, match=r"have the shape \(1, 9, 9\)"):
        predictor.predict(tmp_path / "other.npz")


def test_the_same_seed_gives_the_same_predictor() -> None:
    one, other = (fit(line(), "y", to=name, study=name, devices="1xcpu", seed=5) for name in ("one", "other"))
    assert one.score == other.score
    assert one.predict(line(9)).tolist() == other.predict(line(9)).tolist()


def test_a_directory_is_not_overwritten_and_more_trials_go_on_in_it() -> None:
    fit(line(), "y", to="m", study="s")
    with pytest.raises(ht.InputError, match="holds a fit already"):
        fit(line(), "y", to="m")
    predictor = fit(None, "y", to="m", trials=3, resume=True)
    with open_storage("sqlite:///hydra_tune.db", read_only=True) as storage:
        records = trial_records(storage, "s")
    assert len([record for record in records if record.state == "COMPLETE"]) == 3
    assert predictor.study == "s"
    with pytest.raises(ht.InputError, match="no fit to go on with"):
        fit(line(), "y", to="elsewhere", resume=True)


def test_a_refit_learns_from_all_rows() -> None:
    frame = line(200)
    predictor = fit(frame, "y", to="m", folds=1, refit=True)
    assert predictor.description.refit
    assert predictor.evaluate(line(40, seed=9))["r2"] > 0.95
    weights = [path.read_bytes() for path in sorted(Path("m").rglob("models/trial-*.safetensors"))]
    assert len(set(weights)) == len(weights)
    judged = {each.column for each in predictor.feature_importance()}
    assert judged == {"a", "b"}


def test_resuming_the_study_goes_on_with_the_fit() -> None:
    from hydra_tune.cli.app import run

    fit(line(), "y", to="m", study="s", trials=1)
    before = len(ht.Predictor("m").leaderboard())
    assert run(["resume", "s", "--trials", "2", "-q"]) == 0
    assert len(ht.Predictor("m").leaderboard()) > before


def test_with_a_memory_budget_each_model_gets_its_strategy() -> None:
    predictor = fit(mixed(), "bought", to="m", trials=1, device_memory="64MiB", folds=2)
    assert set(predictor.leaderboard()["strategy"]) == {"whole"}  # all of them fit


def test_ctrl_c_leaves_a_usable_predictor_and_resuming_goes_on(tmp_path: Path) -> None:
    mixed().to_csv(tmp_path / "t.csv", index=False)
    command = [
        sys.executable, "-m", "hydra_tune", "fit", "t.csv", "--target", "bought", "--to", "m", "--study", "s",
        "--devices", "2xcpu", "--seed", "0", "--time", "90s",
    ]  # fmt: skip
    running = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert running.stderr is not None
    seen = []
    for printed in running.stderr:
        seen.append(printed)
        if "COMPLETE" in printed:
            break
    os.kill(running.pid, signal.SIGINT)
    _, rest = running.communicate()
    assert running.returncode == 130, "".join(seen) + rest
    assert "the best so far is in m" in rest
    assert "--to m --resume" in rest
    predictor = ht.Predictor(tmp_path / "m")
    assert len(predictor.predict(tmp_path / "t.csv")) == 120
    spent = json.loads((tmp_path / "m" / "fit.json").read_text())["spent"]
    done = subprocess.run(
        [*command[:-1], f"{spent + 3:.0f}s", "--resume", "--json"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["study"] == "s"
    assert found["models"]
