"""A full disk, by a limit on the size of files: clear errors, the state before intact, and the study can be resumed."""

from __future__ import annotations

import json
import resource
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

from tests.fault.searches import command, run

LARGE = """
from functools import partial
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset
import hydra_tune as ht

class Slow(nn.Module):
    def forward(self, x):
        time.sleep(0.02)
        return x

def build(trial):
    lr = trial.suggest_float("lr", 0.01, 0.02)
    data = TensorDataset(torch.randn(100, 8), torch.zeros(100, dtype=torch.long))
    model = nn.Sequential(nn.Linear(8, 20_000), Slow(), nn.Linear(20_000, 2))
    return ht.Candidate(model=model, loss=nn.functional.cross_entropy, optimizer=partial(torch.optim.Adam, lr=lr),
                        train=data, valid=data, batch_size=10, epochs=6)
"""


def run_with_small_files(*arguments: str, folder: Path, limit: int) -> subprocess.CompletedProcess[str]:
    """Run a command whose processes cannot write files larger than `limit` bytes."""

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    return subprocess.run(command(*arguments), capture_output=True, text=True, cwd=folder, preexec_fn=limit_files)


def messages(folder: Path) -> list[str]:
    with closing(sqlite3.connect(folder / "hydra_tune.db")) as connection:
        return [message for (message,) in connection.execute("SELECT message FROM hydra_events")]


def test_no_room_for_checkpoints_and_weights(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text(LARGE)
    flags = ["--trials", "1", "--devices", "1xcpu", "--study", "s", "--checkpoint-seconds", "0.2"]
    full = run_with_small_files("search", "large.py:build", *flags, folder=tmp_path, limit=850_000)
    assert full.returncode == 1
    assert "weights of 880008 bytes cannot be written to" in full.stderr
    assert "make room there and resume the study" in full.stderr
    assert full.stderr.count("\nerror:") == 1
    assert any("a checkpoint of" in note and "cannot be written" in note for note in messages(tmp_path))
    assert not list(tmp_path.rglob("*.tmp")), "nothing half written is left"

    resumed = run("resume", "s", "--json", folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    (trial,) = json.loads(resumed.stdout)["trials"]
    assert trial["state"] == "COMPLETE"
    assert run("export", "s", "--to", "out", folder=tmp_path).returncode == 0


def test_no_room_for_the_database(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text(
        "def build(trial):\n    x = trial.suggest_float('x', 0, 1)\n    for step in range(400):\n"
        "        trial.report(x, step)\n    return x\n"
    )
    flags = ["--trials", "60", "--devices", "2xcpu", "--study", "s", "--sampler", "random", "--seed", "1"]
    full = run_with_small_files("search", "b.py:build", *flags, folder=tmp_path, limit=1_000_000)
    assert full.returncode == 2
    assert "Traceback" not in full.stderr
    assert full.stderr.splitlines()[-1].startswith("error: database")
    acknowledged = {line.split()[1] for line in full.stderr.splitlines() if "COMPLETE" in line}

    with closing(sqlite3.connect(tmp_path / "hydra_tune.db")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    resumed = run("resume", "s", "--json", folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    trials = json.loads(resumed.stdout)["trials"]
    assert len(trials) == 60
    assert {trial["state"] for trial in trials} == {"COMPLETE"}
    assert len(acknowledged) < 60


def test_no_room_to_hand_candidates_over(tmp_path: Path) -> None:
    """Data that does not fit where processes hand it to each other is built where it is used instead."""
    (tmp_path / "wide.py").write_text(
        LARGE.replace("randn(100, 8)", "randn(100, 6000)")
        .replace("Linear(8,", "Linear(6000,")
        .replace("20_000", "4")
        .replace("epochs=6", "epochs=1")
    )
    (tmp_path / "spill").mkdir()
    flags = ["--trials", "4", "--devices", "1xcpu", "--study", "s", "--spill", "spill", "--json"]
    full = run_with_small_files("search", "wide.py:build", *flags, folder=tmp_path, limit=1_000_000)
    assert full.returncode == 0, full.stderr
    assert {trial["state"] for trial in json.loads(full.stdout)["trials"]} == {"COMPLETE"}
    assert not list((tmp_path / "spill").iterdir())
