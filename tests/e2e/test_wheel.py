"""The built wheel works from another folder, with its mapped subpackages and migrations inside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_wheel_installs_and_runs_from_another_folder(tmp_path: Path) -> None:
    quiet = ["-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    pip = [sys.executable, "-m", "pip"]
    # From a copy: setuptools leaves its build folder in the source, and what was left there last time would be packed.
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "*_files"))
    subprocess.run([*pip, "wheel", *quiet, "-w", str(tmp_path), str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("hydra_tune-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for inside in ("py.typed", "storage/migrations/env.py", "cli/app.py", "dashboard/static/pages/study.js"):
        assert f"hydra_tune/{inside}" in names
    assert not [name for name in names if name.startswith(("storage/", "cli/", "search_spaces/", "tests/"))]

    place = tmp_path / "site"
    subprocess.run([*pip, "install", *quiet, "--target", str(place), str(wheel)], check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(place)}

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run(
        "-c", "import hydra_tune.storage, hydra_tune.cli.app as a; print(hydra_tune.storage.__file__, a.__file__)"
    )
    assert all(path.startswith(str(place)) for path in where.split())
    (tmp_path / "spec.yaml").write_text("space: mlp\ndata: wine\ntrials: 1\nepochs: 1\ndevices: 2xcpu\n")
    assert "COMPLETE" in run("-m", "hydra_tune", "search", "spec.yaml")
