"""Odd files, values and messages: one line names the value and the fix, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import threading
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hydra_tune as ht
from hydra_tune.cli.app import run as here
from hydra_tune.core.csv_cells import inert
from hydra_tune.core.errors import SpecError, shortened
from hydra_tune.storage import open_storage
from hydra_tune.storage.queries import trial_attempts
from hydra_tune.training.checkpoint import Checkpoints
from tests.candidates import small_candidate
from tests.fault.searches import command, outcomes, run, started, wait_for

# Files


def test_stray_files_beside_a_checkpoint_are_no_checkpoints(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"a": torch.ones(2)})
    for name in (
        "step-12 (conflicted copy).json",
        "step-.json",
        "step-9.json.tmp",
        "step-1e3.json",
        "step-\u0663.json",
    ):
        (tmp_path / name).write_text("{}")
    found = checkpoints.newest()
    assert found is not None
    assert (found.step, found.damaged) == (3, ())
    checkpoints.save(4, {"a": torch.ones(2)})


@pytest.mark.parametrize("damage", ["deep", "header", "list", "empty"])
def test_whatever_is_in_a_damaged_checkpoint_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (3, 4):
        checkpoints.save(step, {"a": torch.full((2,), float(step))})
    tensors, facts = checkpoints.files(4)
    if damage == "deep":
        facts.write_text('{"state":' + "[" * 100_000 + "]" * 100_000 + "}")
    elif damage == "header":
        tensors.write_bytes((2**62).to_bytes(8, "little") + b"{}")
        from hydra_tune.training.checkpoint import _digest

        whole = json.loads(facts.read_text())
        facts.write_text(json.dumps({**whole, "sha256": _digest(4, whole["state"], tensors.read_bytes())}))
    else:
        facts.write_text("[1]" if damage == "list" else "")
    found = checkpoints.newest()
    assert found is not None
    assert found.step == 3
    assert found.state["a"].tolist() == [3.0, 3.0]
    assert found.damaged[0].startswith("the checkpoint of step 4 is damaged (")


def test_a_files_folder_that_is_a_file_is_named_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hydra_tune_files").write_text("notes")
    (tmp_path / "b.py").write_text("def build(trial):\n    return 1.0\n")
    assert here(["search", "b.py:build", "--trials", "1", "--devices", "1xcpu"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "hydra_tune_files' is no directory, but weights go there (rename or remove it)" in error
    assert not (tmp_path / "hydra_tune.db").exists()


def test_an_npz_with_an_absurd_header_gets_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (9999999999999, 99999)}"
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    with zipfile.ZipFile(tmp_path / "images.npz", "w") as file:
        file.writestr("images.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    assert here(["fit", "images.npz", "--target", "y"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "images.npz cannot be read as .npz" in error


def test_no_file_is_for_everybody_to_change(tmp_path: Path) -> None:
    (tmp_path / "c.py").write_text("from tests.candidates import build_small as build\n")
    flags = ["--trials", "1", "--devices", "1xcpu", "--study", "s"]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        command("search", "c.py:build", *flags), cwd=tmp_path, capture_output=True, text=True, umask=0,
        env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = [path for path in tmp_path.rglob("hydra_tune*") if "cache" not in path.parts]
    made += list((tmp_path / "hydra_tune_files").rglob("*"))
    assert any(path.suffix == ".safetensors" for path in made)
    assert [path for path in made if path.stat().st_mode & stat.S_IWOTH] == []


# Messages and values


def test_a_huge_message_is_cut_where_it_is_shown_and_stored(capfd: pytest.CaptureFixture[str]) -> None:
    def objective(trial: Any) -> float:
        if trial.number == 1:
            raise ValueError("begin " + "x" * 50_000_000 + " end")
        return 1.0

    result = ht.search(objective, trials=2, devices="1xcpu", study="s")
    error = result.trials[1].error
    assert error.startswith("ValueError: begin xxx")
    assert error.endswith("x end")
    assert "characters left out" in error
    assert len(error) < 5_000
    with open_storage("sqlite:///hydra_tune.db", read_only=True) as storage:
        assert len(trial_attempts(storage, "s", 1)[0].traceback) < 25_000
    shown = capfd.readouterr().err
    assert len(shown) < 30_000
    assert max(len(line) for line in shown.splitlines() if "FAILED" in line) < 1_000
    result.close()


def test_what_is_left_out_is_counted() -> None:
    assert shortened("abc", 3) == "abc"
    text = shortened("a" * 100 + "b" * 100, 30)
    assert text == "a" * 20 + " … 170 characters left out … " + "b" * 10


def test_a_complex_number_does_not_lose_its_imaginary_part() -> None:
    def objective(trial: Any) -> Any:
        if trial.number == 1:
            trial.report(np.complex64(1 + 2j), 0)
        return [np.complex64(1 + 2j), 1.0, 1j, np.array(3 + 0j), 2.0][trial.number]

    seen = outcomes(objective, 5)
    assert [state for state, _ in seen] == ["FAILED"] * 4 + ["COMPLETE"]
    assert "is the complex number" in seen[0][1]
    assert "report needs a real number" in seen[1][1]


LOSSES: list[tuple[Any, str]] = [
    (nn.CrossEntropyLoss(reduction="none"), "Candidate.loss returned a tensor of shape (8,) (return the batch's mean"),
    (lambda o, t: 3, "Candidate.loss returned 3 (return a tensor of one number"),
    (lambda o, t: nn.functional.cross_entropy(o, t).detach(), "Candidate.loss returned a tensor without a gradient"),
    (lambda o, t: None, "Candidate.loss returned None"),
]


@pytest.mark.parametrize("strategy", ["whole", "shard"])
def test_a_loss_that_cannot_be_trained_on_names_the_field(strategy: str) -> None:
    def build(trial: Any) -> ht.Candidate:
        return small_candidate(loss=LOSSES[trial.number][0], epochs=1, batch_size=8)

    for (state, error), (_, said) in zip(outcomes(build, len(LOSSES), strategy=strategy), LOSSES, strict=True):
        assert state == "FAILED"
        assert said in error
        assert "Traceback" not in error


def test_an_optimizer_or_a_model_that_is_none_names_the_field() -> None:
    def build(trial: Any) -> ht.Candidate:
        if trial.number == 2:
            return small_candidate(model=None)
        return small_candidate(optimizer=lambda parameters: [None, "adam"][trial.number], epochs=1)

    seen = outcomes(build, 3)
    assert [state for state, _ in seen] == ["FAILED"] * 3
    assert "Candidate.optimizer returned None (give a function of the parameters" in seen[0][1]
    assert "Candidate.optimizer returned 'adam'" in seen[1][1]
    assert "Candidate.model cannot be None (give a torch.nn.Module)" in seen[2][1]


def test_a_build_that_ends_its_process_is_named() -> None:
    def build(trial: Any) -> Any:
        if trial.number == 0:
            os._exit(7)
        if trial.number == 1:
            os.kill(os.getpid(), signal.SIGSEGV)
        return 1.0

    seen = outcomes(build, 3)
    assert [state for state, _ in seen] == ["LOST", "LOST", "COMPLETE"]
    assert "exited with code 7: what ran in it called os._exit" in seen[0][1]
    assert "SIGSEGV): native code that ran in it crashed" in seen[1][1]
    assert all(error.endswith("(while it ran your build function)") for _, error in seen[:2])


@pytest.mark.parametrize(
    ("cell", "shown"), [("=1+1", "'=1+1"), ("@x", "'@x"), ("-cat", "'-cat"), ("-1.5", "-1.5"), ("a", "a"), (-2, -2)]
)
def test_a_cell_is_no_formula(cell: Any, shown: Any) -> None:
    assert inert(cell) == shown


def test_predictions_in_a_file_are_no_formulas(tmp_path: Path) -> None:
    import pandas

    from hydra_tune.cli.predict import inert_csv

    inert_csv(pandas.DataFrame({"=target": ["=HYPERLINK(1)", "b"], "n": [-1, 2]}), tmp_path / "p.csv")
    assert (tmp_path / "p.csv").read_text() == "'=target,n\n'=HYPERLINK(1),-1\nb,2\n"


# Moments


def test_two_searches_that_make_one_study_at_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both see that it does not exist; one makes it, and the other is told so."""
    from hydra_tune.coordinator import study as module

    both, seen = threading.Barrier(2), []
    names = module.optuna.get_all_study_names

    def together(storage: Any) -> list[str]:
        found: list[str] = names(storage)
        both.wait()
        return found

    monkeypatch.setattr(module.optuna, "get_all_study_names", together)
    from hydra_tune.coordinator.settings import make_settings
    from hydra_tune.training.source import PickledSource

    open_storage("sqlite:///hydra_tune.db").close()
    settings = make_settings(trials=1, study="s", storage="sqlite:///hydra_tune.db")

    def start() -> None:
        try:
            module.OwnedStudy(settings, None, PickledSource.of(partial(int, "1"))).close()
            seen.append("made")
        except SpecError as error:
            seen.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == ["made", "study 's' exists already (use resume to go on with it, or another name)"]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_goes_away_costs_nothing(tmp_path: Path, stream: str) -> None:
    (tmp_path / "b.py").write_text(
        "import os, time\ndef build(trial):\n    open('on', 'w').close()\n"
        "    while not os.path.exists('go'):\n        time.sleep(0.02)\n    return 1.0\n"
    )
    with started(
        "search", "b.py:build", "--trials", "3", "--devices", "1xcpu", "--study", "s", folder=tmp_path
    ) as search:
        wait_for((tmp_path / "on").exists, "the first trial")
        getattr(search, stream).close()
        setattr(search, stream, None)
        (tmp_path / "go").touch()
        search.wait()
    assert search.returncode == 0
    listed = json.loads(run("trials", "s", "--json", folder=tmp_path).stdout)
    assert [trial["state"] for trial in (listed["trials"] if isinstance(listed, dict) else listed)] == ["COMPLETE"] * 3
