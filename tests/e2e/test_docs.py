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
from hydra_tune.coordinator.settings import NAMES
from hydra_tune.coordinator.spec import known_keys

ROOT = Path(__file__).parents[2]
USAGE = (ROOT / "docs" / "usage.md").read_text()
README = (ROOT / "README.md").read_text()


def test_the_readmes_example_runs(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert example.count("\n") < 32
    (tmp_path / "example.py").write_text(example)
    done = subprocess.run([sys.executable, "example.py"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    best, params = done.stdout.split(" ", 1)
    assert 0.9 < float(best) <= 1
    assert "'width'" in params


def first_column(heading: str) -> list[str]:
    """The names in the first column of the table in usage.md that has this heading."""
    (rows,) = re.findall(rf"^\| {heading} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", USAGE, flags=re.MULTILINE)
    return [name for row in rows.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]


@pytest.mark.smoke
def test_the_tables_name_every_argument_key_and_field_and_no_other() -> None:
    assert first_column("argument") == list(NAMES)
    assert sorted(first_column("key")) == sorted(set(known_keys()) - set(NAMES))
    assert sorted(first_column("field")) == sorted(field.name for field in dataclasses.fields(ht.Candidate))


@pytest.mark.smoke
def test_every_command_and_flag_is_documented() -> None:
    for command in app.registered_commands:
        name = command.callback.__name__
        assert f"`{name}" in USAGE or f"hydra-tune {name}" in USAGE
        for parameter in inspect.signature(command.callback).parameters.values():
            flag = {"as_json": "json"}.get(parameter.name, parameter.name).replace("_", "-")
            positional = "Argument" in str(parameter.annotation)
            assert positional or f"--{flag}" in USAGE, f"{name} --{flag}"


@pytest.mark.smoke
def test_links_between_docs_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.smoke
def test_exported_names() -> None:
    assert set(ht.__all__) == {
        "Candidate", "CandidateError", "HydraTuneError", "InputError", "Pinned", "Predictor", "SearchFailed",
        "SearchResult", "SpecError", "StorageError", "__version__", "epoch_order", "extended", "fit", "search",
        "trial_seed",
    }  # fmt: skip
    for name in ht.__all__:
        assert getattr(ht, name) is not None
