"""Code that a database names runs only if it is under the current folder or the user names it too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sqlalchemy import update

from hydra_tune.cli.app import run
from hydra_tune.storage import open_storage
from hydra_tune.storage.database import writing
from hydra_tune.storage.tables import HYDRA_STUDIES

BUILD = """
def build(trial):
    open("ran", "a").write("x")
    return trial.suggest_float("x", 0, 1)
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """The folder of a study that was started there, whose record others may change."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "b.py").write_text(BUILD)
    return tmp_path / "mine"


def start(study: Path, spec: str) -> None:
    assert run(["search", spec, "--trials", "1", "--devices", "1xcpu", "--study", "s", "-q"]) == 0


def rewrite(study: Path, spec: object) -> None:
    """Change the recorded source and its text, as anyone can who may write to the database."""
    with open_storage(f"sqlite:///{study}/hydra_tune.db") as storage, writing(storage.engine) as connection:
        connection.execute(update(HYDRA_STUDIES).values(spec=json.dumps(spec), source=None))


@pytest.mark.parametrize("command", [["resume", "s", "--trials", "2", "-q"], ["export", "s", "--to", "out"]])
@pytest.mark.parametrize("kind", ["file", "link", "module", "data"])
def test_code_from_elsewhere_is_not_run(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str], kind: str
) -> None:
    monkeypatch.chdir(study)
    start(study, "b.py:build")
    evil = study.parent / "evil.py"
    evil.write_text(f"open({str(study / 'pwned')!r}, 'w')\n" + BUILD)
    (study / "link.py").symlink_to(evil)
    monkeypatch.syspath_prepend(str(study.parent))
    data = {"kind": "family", "families": ["mlp"], "data": f"{evil}:build", "overrides": {}, "epochs": 1}
    specs = {
        "file": {"kind": "file", "path": str(evil), "function": "build"},
        "link": {"kind": "file", "path": str(study / "link.py"), "function": "build"},
        "module": {"kind": "module", "module": "evil", "function": "build"},
        "data": data,
    }
    rewrite(study, specs[kind])
    assert run(command) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    named = {"link": str(study / "link.py"), "module": "evil"}.get(kind, str(evil))
    assert f"study 's' names code that is not under the current folder: {named!r}" in error
    assert f"if you trust it: --trust {named}" in error
    assert not (study / "pwned").exists()


def test_code_that_the_user_names_is_run(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = study.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert run(["search", str(study / "b.py") + ":build", "--trials", "1", "--study", "s", "--devices", "1xcpu"]) == 0
    said = capsys.readouterr().err
    assert f"if it is interrupted: hydra-tune resume s --trust {study / 'b.py'}" in said
    assert run(["resume", "s", "--trials", "2", "-q"]) == 2
    assert run(["resume", "s", "--trials", "2", "-q", "--trust", str(study)]) == 0
    assert run(["resume", "s", "--trials", "3", "-q", "--trust", str(study / "b.py")]) == 0
    assert (elsewhere / "ran").read_text() == "xxx"


def test_code_here_needs_no_word(
    study: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(study)
    (study / "package").mkdir()
    (study / "package" / "b.py").write_text(BUILD)
    monkeypatch.syspath_prepend(str(study))
    assert run(["search", "package.b:build", "--trials", "1", "--study", "s", "--devices", "1xcpu"]) == 0
    assert "--trust" not in capsys.readouterr().err
    assert run(["resume", "s", "--trials", "2", "-q"]) == 0
