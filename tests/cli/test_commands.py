"""search, studies, trials, show, best, export, spaces and doctor in sequence, each as a real process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Command

Searched = tuple[Path, subprocess.CompletedProcess[str]]


def test_search_prints_one_json_document_and_progress_on_stderr(searched: Searched) -> None:
    _, done = searched
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["study"] == "digits"
    assert len(found["trials"]) == 4
    assert found["best"]["value"] == max(trial["value"] for trial in found["trials"] if trial["value"] is not None)
    assert "[4/4] trial" in done.stderr
    assert re.search(r"devices ran for [\d.]+ s, [\d.]+ of the least possible \(", done.stderr)


def test_studies(look: Command) -> None:
    listed = json.loads(look("studies", "--json").stdout)
    assert [study["name"] for study in listed] == ["digits"]
    table = look("studies").stdout
    assert "digits" in table
    assert "maximize accuracy" in table


def test_trials(look: Command, searched: Searched) -> None:
    trials = json.loads(look("trials", "digits", "--json").stdout)
    assert trials == json.loads(searched[1].stdout)["trials"]
    rows = look("trials", "digits", "--best-first").stdout.splitlines()
    shown = [float(row.split()[1]) for row in rows if "COMPLETE" in row]
    assert shown == sorted(shown, reverse=True)


def test_show_a_study_and_a_trial(look: Command) -> None:
    study = look("show", "digits").stdout
    assert "maximize accuracy" in study
    assert "seed 0" in study
    trial = json.loads(look("show", "digits", "0", "--json").stdout)
    assert set(trial["metrics"]) == {"0", "1"}
    assert {unit["kind"] for unit in trial["units"]} >= {"build", "train", "evaluate"}
    text = look("show", "digits", "0").stdout
    assert "train_loss" in text
    assert "strategy whole" in text
    missing = look("show", "digits", "9")
    assert missing.returncode == 2
    assert missing.stderr == "error: study 'digits' has no trial 9 (it has trials 0 to 3)\n"


def test_best_and_export_reload_to_the_same_accuracy(look: Command, searched: Searched) -> None:
    folder, _ = searched
    best = json.loads(look("best", "digits", "--json").stdout)
    assert f"trial {best['number']}: COMPLETE" in look("best", "digits").stdout
    exported = look("export", "digits", "--to", "out", "--json")
    assert exported.returncode == 0, exported.stderr
    assert json.loads(exported.stdout)["no_program_because"] == ""
    record = json.loads((folder / "out" / "trial.json").read_text())
    assert record["params"] == best["params"]

    from optuna.trial import FixedTrial
    from safetensors.torch import load_model

    from hydra_tune.search_spaces.families import FamilyBuild

    candidate = FamilyBuild(families=("mlp", "resnet", "transformer"), data="digits")(FixedTrial(best["params"]))
    load_model(candidate.model, str(folder / "out" / "model.safetensors"))
    inputs, targets = candidate.valid.tensors
    candidate.model.eval()
    with torch.no_grad():
        accuracy = (candidate.model(inputs).argmax(1) == targets).double().mean().item()
        program = torch.export.load(folder / "out" / "program.pt2").module()
        same = (program(inputs).argmax(1) == targets).double().mean().item()
    assert accuracy == pytest.approx(best["value"], abs=1e-6)
    assert same == pytest.approx(accuracy, abs=0.003)

    again = look("export", "digits", "--to", "out")
    assert again.returncode == 2
    assert "--force" in again.stderr


def test_spaces(look: Command) -> None:
    families = json.loads(look("spaces", "--json").stdout)
    tabular = {"linear", "tabular_mlp", "tabular_resnet", "ft_transformer"}
    assert set(families) == {"mlp", "resnet", "transformer", "gpt", "lstm", *tabular}
    assert "width_0" in look("spaces", "mlp").stdout
    unknown = look("spaces", "mlpp")
    assert unknown.returncode == 2
    assert "did you mean 'mlp'?" in unknown.stderr


def test_doctor(look: Command, hydra_tune: Command) -> None:
    report = json.loads(look("doctor", "--json").stdout)
    assert report["packages"]["torch"].startswith("2.13.0")
    assert report["database"]["ok"]
    assert "1 studies, 4 trials" in report["database"]["says"]
    fresh = hydra_tune("doctor")
    assert fresh.returncode == 0
    assert "a search creates it" in fresh.stdout


def test_a_resumed_search_on_the_command_line_goes_on(look: Command) -> None:
    spec = str(Path(__file__).parents[2] / "examples" / "optuna_objective.py") + ":objective"
    first = look("search", spec, "--trials", "2", "--study", "wine", "--direction", "maximize", "-q")
    assert first.returncode == 0, first.stderr
    assert first.stderr == ""
    again = look("search", spec, "--trials", "3", "--study", "wine", "--direction", "maximize", "--resume", "--json")
    assert len(json.loads(again.stdout)["trials"]) == 3


@pytest.mark.smoke
def test_help_does_not_import_torch() -> None:
    program = "import sys; sys.argv = ['hydra-tune', '--help']\nfrom hydra_tune.cli.app import run\nrun(['--help'])\n"
    program += "print([m for m in ('torch', 'optuna', 'sqlalchemy', 'numpy') if m in sys.modules], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == "[]\n"
    for command in ("search", "studies", "trials", "show", "best", "export", "spaces", "simulate", "doctor"):
        assert command in done.stdout
