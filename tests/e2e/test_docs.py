"""The docs are true: the README's example runs, and every option, key, field and command is documented."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hydra_tune as ht
from hydra_tune.cli.app import app
from hydra_tune.spec import known_keys

ROOT = Path(__file__).parents[2]
USAGE = (ROOT / "docs" / "usage.md").read_text()
README = (ROOT / "README.md").read_text()


def test_the_readmes_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert example.count("\n") < 32
    (tmp_path / "example.py").write_text(example)
    done = subprocess.run([sys.executable, "example.py"], capture_output=True, text=True, cwd=tmp_path, timeout=150)
    assert done.returncode == 0, done.stderr
    best, params = done.stdout.split(" ", 1)
    assert 0.9 < float(best) <= 1
    assert "'width'" in params


@pytest.mark.smoke
def test_every_argument_field_key_and_command_is_documented() -> None:
    arguments = [name for name in inspect.signature(ht.search).parameters if name != "build"]
    fields = [field.name for field in dataclasses.fields(ht.Candidate)]
    missing = [name for name in (*arguments, *fields, *known_keys()) if f"`{name}`" not in USAGE]
    assert not missing
    commands = [command.callback.__name__ for command in app.registered_commands]
    assert not [name for name in commands if f"`{name}" not in USAGE and f"hydra-tune {name}" not in USAGE]


@pytest.mark.smoke
def test_every_flag_is_documented() -> None:
    for command in app.registered_commands:
        for name, parameter in inspect.signature(command.callback).parameters.items():
            flag = {"as_json": "json"}.get(name, name).replace("_", "-")
            positional = "Argument" in str(parameter.annotation)
            assert positional or f"--{flag}" in USAGE, f"{command.callback.__name__} --{flag}"


@pytest.mark.smoke
def test_links_between_docs_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.smoke
def test_exported_names() -> None:
    assert set(ht.__all__) == {
        "Candidate", "CandidateError", "HydraTuneError", "InputError", "Pinned", "Predictor", "SearchFailed",
        "SearchResult", "SpecError", "StorageError", "__version__", "epoch_order", "fit", "search", "trial_seed",
    }  # fmt: skip
    for name in ht.__all__:
        assert getattr(ht, name) is not None
