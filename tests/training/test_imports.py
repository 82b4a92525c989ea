"""The modules that a file imports from its own folder are found by reading, transitively; nothing is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydra_tune.training.imports import text_with_imports

pytestmark = pytest.mark.smoke

FILES = {
    "build.py": "import os, numpy\nimport one\nfrom pack.inner import value\nfrom pack import other\n"
    "def build(trial):\n    from late import thing\n",
    "one.py": "import two, build\nraise SystemExit('run')\n",
    "two.py": "import one\n",
    "late.py": "thing = (\n",
    "unused.py": "",
    "numpy/readme.txt": "",
    "pack/__init__.py": "from . import quiet\n",
    "pack/quiet.py": "from ..two import x\nfrom ...beyond import y\n",
    "pack/inner.py": "from .deep.down import value\n",
    "pack/other.py": "",
    "pack/unused.py": "",
    "pack/deep/down.py": "",
}


def test_imports_are_followed(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (tmp_path / "beyond.py").write_text("")
    whole = text_with_imports(folder / "build.py", folder)
    assert whole is not None
    assert whole.startswith(FILES["build.py"])
    assert [line[2:] for line in whole.splitlines() if line.startswith("# ")] == [
        "late.py", "one.py", "pack/__init__.py", "pack/deep/down.py", "pack/inner.py", "pack/other.py", "pack/quiet.py",
        "two.py",
    ]  # fmt: skip


def test_a_file_without_imports_is_its_own_text(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("x = 1\n")
    assert text_with_imports(tmp_path / "b.py", tmp_path) == "x = 1\n"
    assert text_with_imports(tmp_path / "missing.py", tmp_path) is None
    (tmp_path / "bytes.py").write_bytes(b"\xff\xfe")
    assert text_with_imports(tmp_path / "bytes.py", tmp_path) is None
