"""Files that an objective keeps: with the best trials, in `best`, `show` and `export`, and not in the way of others."""

from __future__ import annotations

import json
import os
from pathlib import Path

import optuna
import pytest

import hydra_tune as ht
from hydra_tune.cli.app import run
from hydra_tune.training.kept_files import keep_file, kept_files

OBJECTIVE = """
import pathlib
import optuna


def objective(trial):
    folder = pathlib.Path(f"work-{trial.number}")
    folder.mkdir()
    (folder / "model.txt").write_text("draft")
    trial.keep(folder / "model.txt")
    (folder / "model.txt").write_text(f"model {trial.number}")
    path = trial.keep(folder / "model.txt")
    assert path.read_text() == f"model {trial.number}"
    trial.keep(folder, name="everything")
    if trial.number == 1:
        raise optuna.TrialPruned
    if trial.number == 2:
        raise ValueError("odd")
    return abs(trial.number - 3)
"""
FLAGS = ["--study", "s", "--n-trials", "5", "--devices", "1xcpu", "--keep-weights", "2"]


def test_the_best_trials_keep_their_files(capsys: pytest.CaptureFixture[str]) -> None:
    Path("obj.py").write_text(OBJECTIVE)
    assert run(["search", "obj.py:objective", *FLAGS]) == 0
    assert "export:" in capsys.readouterr().out
    left = sorted(path.parent.name for path in Path("hydra_tune_files").rglob("trial-*.files/model.txt"))
    assert left == ["trial-3.files", "trial-4.files"], "two are kept, none of a pruned or failed trial"

    for command in (["best", "s"], ["show", "s", "3"]):
        assert run(command) == 0
        shown = capsys.readouterr().out.splitlines()
        files = shown[shown.index("files:") + 1 :][:2]
        assert [Path(line.strip()).name for line in files] == ["everything", "model.txt"]
        assert run([*command, "--json"]) == 0
        assert [Path(each).name for each in json.loads(capsys.readouterr().out)["files"]] == ["everything", "model.txt"]

    assert run(["export", "s", "--to", "out"]) == 0
    assert Path("out/model.txt").read_text() == Path("out/everything/model.txt").read_text() == "model 3"
    assert json.loads(Path("out/trial.json").read_text())["number"] == 3
    assert run(["export", "s", "--to", "out", "--trial", "4"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert run(["export", "s", "--to", "out", "--trial", "4", "--force"]) == 0
    assert Path("out/model.txt").read_text() == "model 4"
    assert run(["export", "s", "--to", "other", "--trial", "0"]) == 2
    assert "trial.keep(path)" in capsys.readouterr().err


def test_files_of_a_result_and_of_plain_optuna(tmp_path: Path) -> None:
    def objective(trial: optuna.Trial) -> float:
        trial = ht.extended(trial)
        path = tmp_path / f"{trial.number}.txt"
        path.write_text("kept")
        trial.keep(path, name="note.txt")
        return trial.suggest_float("x", 0, 1)

    result = ht.search(objective, n_trials=2, devices="1xcpu", progress=False)
    assert {name: path.read_text() for name, path in result.files().items()} == {"note.txt": "kept"}
    assert result.files(0).keys() == result.files(1).keys()
    result.close()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    optuna.create_study().optimize(objective, n_trials=1)
    optuna.logging.set_verbosity(optuna.logging.INFO)


def test_what_cannot_be_kept(tmp_path: Path) -> None:
    kept, source = tmp_path / "kept", tmp_path / "a"
    source.write_text("1")
    with pytest.raises(FileNotFoundError, match="there is no 'nowhere'"):
        keep_file("nowhere", kept)
    for name in ("", "..", "a/b", "a\0b", ".partial-a"):
        with pytest.raises(ht.InputError, match="cannot be named"):
            keep_file(source, kept, name)
    assert kept_files(kept) == []
    keep_file(source, kept)
    broken = tmp_path / "b" / "a"
    broken.mkdir(parents=True)
    os.mkfifo(broken / "pipe")
    with pytest.raises(Exception, match="named pipe"):
        keep_file(broken, kept)
    assert (kept / "a").read_text() == "1", "the earlier copy stays"
    assert sorted(path.name for path in kept.iterdir()) == ["a"]
