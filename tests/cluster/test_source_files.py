"""The user's modules that travel to nodes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from hydra_tune.cluster.source_files import source_at, source_files, write_files
from hydra_tune.core.errors import SpecError
from hydra_tune.training.source import FileSource, PickledSource


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A package, a module beside it that it imports lazily, and a file that nobody imports."""
    folder = tmp_path / "project"
    files = {
        "sent_package/__init__.py": "",
        "sent_package/models.py": "def build(trial):\n    import sent_lazily\n    return sent_lazily.VALUE\n",
        "sent_lazily.py": "VALUE = 1.0\n",
        "unused.py": "raise SystemExit\n",
        "script.py": "import sent_package.models\nbuild = sent_package.models.build\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


NEEDED = {"sent_package/__init__.py", "sent_package/models.py", "sent_lazily.py"}


def test_a_file_and_what_it_imports(project: Path, tmp_path: Path) -> None:
    source = FileSource(str(project / "script.py"), "build")
    files = source_files(source)
    assert set(files) == NEEDED | {"script.py"}
    write_files(files, tmp_path / "node")
    assert source_at(source, tmp_path / "node") == FileSource(str(tmp_path / "node" / "script.py"), "build")
    assert (tmp_path / "node" / "sent_package" / "models.py").read_bytes() == files["sent_package/models.py"]


@pytest.mark.parametrize("inside", [False, True], ids=["its folder", "its package's folder too"])
def test_a_function_from_a_module_of_the_users(project: Path, inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(project))
    if inside:  # as for a script of the package
        monkeypatch.syspath_prepend(str(project / "sent_package"))
    module = importlib.import_module("sent_package.models")
    try:
        assert set(source_files(PickledSource.of(module.build))) >= NEEDED
    finally:
        for name in ("sent_package", "sent_package.models"):
            sys.modules.pop(name, None)


def test_installed_packages_are_not_sent() -> None:
    names = source_files(PickledSource.of(len))
    assert not any(name.startswith(("torch/", "optuna/", "hydra_tune/", "site-packages")) for name in names)


def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="leads out of its folder"):
        write_files({"../outside.py": b""}, tmp_path / "node")
    assert not (tmp_path / "outside.py").exists()
