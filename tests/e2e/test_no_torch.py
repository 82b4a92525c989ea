"""The coordinator imports no torch: it starts in half a second, and leaves the memory to its workers."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import hydra_tune.cli
from hydra_tune.engine.template_client import SHARED

MODULES = [
    "hydra_tune.coordinator.search",
    "hydra_tune.coordinator.plan_search",
    "hydra_tune.coordinator.result",
    "hydra_tune.coordinator.export",
    "hydra_tune.dashboard.app",
    *(f"hydra_tune.cli.{module.name}" for module in pkgutil.iter_modules(hydra_tune.cli.__path__)),
]
OBJECTIVE_MODULES = [
    "hydra_tune.core.seeds",
    "hydra_tune.training.builds",
    "hydra_tune.training.remote_trial",
    "hydra_tune.training.source",
]
"""Modules that a worker needs for an ordinary objective."""

BUILD = """
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hydra_tune as ht


def rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator))


def build(trial):
    lr = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
    model = nn.Sequential(
        nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
    )
    return ht.Candidate(
        model=model, loss=F.cross_entropy, optimizer=partial(torch.optim.Adam, lr=lr), train=rows(64, 0),
        valid=rows(16, 1), batch_size=8, epochs=2, keep="best",
    )
"""

SEARCH = """
import json
import sys

from hydra_tune.coordinator.search import run_search
from hydra_tune.coordinator.settings import make_settings
from hydra_tune.training.source import FileSource

for number, strategy in enumerate(json.loads(sys.argv[1])):
    settings = make_settings(
        trials=2, devices="2xcpu", strategy=strategy, seed=3, progress=False, study=f"s{number}",
        sampler="random", checkpoint_seconds=0.01,
    )
    result = run_search(FileSource(sys.argv[2], "build"), settings)
    assert result.completed == 2, strategy
    assert result.best_params.keys() == {"lr"}
    result.close()
    assert "torch" not in sys.modules, strategy
"""

COMMAND = """
import sys

from hydra_tune.cli.app import main

build = sys.argv[1] + ":build"
for arguments in (
    ["search", build, "--trials", "1", "--devices", "1xcpu", "--study", "s"], ["resume", "s", "--trials", "2"],
    ["show", "s"], ["show", "s", "1"], ["trials", "s"], ["best", "s"], ["studies"],
):
    sys.argv = ["hydra-tune", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code, end.code
    assert "torch" not in sys.modules, arguments
"""

OBJECTIVE = """
import sys
from types import SimpleNamespace

from hydra_tune.training.builds import build_here, write_source
from hydra_tune.training.remote_trial import TrialInfo
from hydra_tune.training.source import FileSource

setup = SimpleNamespace(torch_devices=("cpu",))
context = SimpleNamespace(unit=0, cache={}, resident={}, setup=setup, on_accelerator=False)
path = write_source(FileSource(sys.argv[1], "objective"), ".")
built = build_here(context, path, TrialInfo(number=0, seed=1, attempt="a"))
assert built.values == (2.5,)
assert built.blueprint is None
assert "torch" not in sys.modules
"""


def python(code: str, *arguments: str) -> None:
    """Run code in a process of its own, and show what it printed where it fails."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", [*MODULES, *OBJECTIVE_MODULES])
def test_a_module_of_the_coordinator_imports_no_torch(module: str) -> None:
    python(f"import sys, {module}; assert 'torch' not in sys.modules")


STRATEGIES = {
    "exact": '["whole", "shard", {"name": "pipeline", "microbatches": 2}]',
    "chosen": '["auto", "any", ["whole", "ist"]]',
    "sparse": '["sparse", {"name": "sparse", "stages": 2, "mask": "magnitude"}, {"name": "sparse", "shards": true}]',
    "approximate": '["ist", "elastic", {"name": "elastic", "mode": "sync"}]',
}


@pytest.mark.parametrize("strategies", STRATEGIES.values(), ids=STRATEGIES)
def test_a_search_of_candidates_ends_without_torch_in_the_coordinator(strategies: str, tmp_path: Path) -> None:
    file = tmp_path / "candidates.py"
    file.write_text(BUILD)
    python(SEARCH, strategies, str(file))


def test_commands_end_without_torch(tmp_path: Path) -> None:
    file = tmp_path / "candidates.py"
    file.write_text(BUILD)
    python(COMMAND, str(file))


def test_an_objective_runs_without_torch(tmp_path: Path) -> None:
    file = tmp_path / "objectives.py"
    file.write_text("def objective(trial):\n    return 2.5\n")
    python(OBJECTIVE, str(file))


def test_a_search_of_an_objective_starts_no_process_that_imports_torch(tmp_path: Path) -> None:
    """Neither command line nor template nor worker: the torch that they would find says so."""
    torch = tmp_path / "found_first" / "torch"
    torch.mkdir(parents=True)
    (torch / "version.py").write_text("cuda = hip = xpu = None\n")
    (torch / "__init__.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\nraise ImportError\n")
    (tmp_path / "objectives.py").write_text("def objective(trial):\n    return trial.suggest_float('x', 0, 1)\n")
    command = [sys.executable, "-m", "hydra_tune", "search", "objectives.py:objective", "--trials", "3", "--json"]
    environment = {**os.environ, SHARED: "", "PYTHONPATH": str(torch.parent)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert [trial["state"] for trial in json.loads(done.stdout)["trials"]] == ["COMPLETE"] * 3
    assert not (tmp_path / "imported").exists()


LATER = """
import importlib, json, sys

def objective(trial):
    name = "torch"
    there = name in sys.modules
    drawn = float(importlib.import_module(name).rand(1))
    with open(f"drawn-{trial.number}", "w") as file:
        json.dump([there, drawn], file)
    return trial.suggest_float("x", 0, 1)
"""


def test_an_objective_that_imports_torch_late_draws_what_it_would_draw_if_torch_were_there(tmp_path: Path) -> None:
    drawn = {}
    for name, text in {"late": LATER, "early": f"import torch\n{LATER}"}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "objectives.py").write_text(text)
        command = ["search", "objectives.py:objective", "--trials", "2", "--devices", "1xcpu", "--seed", "3", "-q"]
        command = [sys.executable, "-m", "hydra_tune", *command]
        subprocess.run(command, cwd=folder, check=True, env={**os.environ, SHARED: ""})
        drawn[name] = [json.loads((folder / f"drawn-{number}").read_text()) for number in range(2)]
    assert [there for there, _ in drawn["early"]] == [True, True]
    assert [there for there, _ in drawn["late"]] == [False, True]
    assert [value for _, value in drawn["late"]] == [value for _, value in drawn["early"]]
