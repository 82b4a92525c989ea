"""The snippets of docs/lightning.md run, and so does the example."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "lightning.md").read_text()


def run(folder: Path, *command: str) -> str:
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_snippets_run_in_their_order(tmp_path: Path) -> None:
    texts = [text for text in snippets() if "# ddp_script.py" not in text]
    (tmp_path / "page.py").write_text("\n".join([*texts, "print(type(module).__name__, result.trials[0].strategy)\n"]))
    assert run(tmp_path, "page.py").splitlines()[-1] == "Classifier whole"  # it fits a device of 256 MiB


def test_the_script_for_ddp_runs(tmp_path: Path) -> None:
    first, *_ = snippets()
    (script,) = [text for text in snippets() if "# ddp_script.py" in text]
    (tmp_path / "page.py").write_text(first)
    (tmp_path / "ddp_script.py").write_text(script)
    assert run(tmp_path, "ddp_script.py").splitlines()[-1].startswith("{'lr': ")


def test_the_example_runs(tmp_path: Path) -> None:
    lines = run(tmp_path, str(ROOT / "examples" / "lightning_digits.py")).splitlines()
    assert [line.split(":")[0] for line in lines] == ["build", "objective"]
    assert all(float(line.split()[1]) > 0.8 for line in lines)


def test_the_example_runs_from_the_command_line(tmp_path: Path) -> None:
    spec = f"{ROOT / 'examples' / 'lightning_digits.py'}:build"
    options = ["--trials", "2", "--metric", "val_acc", "--direction", "maximize", "--study", "digits"]
    run(tmp_path, "-m", "hydra_tune", "search", spec, *options)
    assert "COMPLETE" in run(tmp_path, "-m", "hydra_tune", "trials", "digits")


@pytest.mark.smoke
def test_hydra_tune_does_not_import_lightning() -> None:
    code = "import sys, hydra_tune; hydra_tune.Candidate; hydra_tune.search; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "hydra_tune.training.candidate" in done.stdout
    assert "lightning" not in done.stdout
