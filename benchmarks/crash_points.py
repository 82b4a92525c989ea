"""Kill a search at each of its numbered points, resume it, and compare it with the unbroken one to the last bit.

A point is an instant before a sync, a renaming, a removal, a write, a transaction's begin or commit, a message, or the
start of a process, in the coordinator, a worker or the builder (`hydra_tune/engine/crash_points.py`). How many points a
process has differs a little between runs, as timers send messages too; a point that a run does not reach kills nothing.

    python -m benchmarks.crash_points --strategy whole              every point
    python -m benchmarks.crash_points --strategy shard --sample 60  a seeded sample
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import finish
from hydra_tune.engine.crash_points import VARIABLE
from hydra_tune.storage import open_storage
from hydra_tune.storage.queries import trial_records

SPEC = """
from functools import partial
import torch
from torch import nn
from torch.utils.data import TensorDataset
import hydra_tune as ht

def build(trial):
    rows = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(rows, (rows[:, 0] > 0).long())
    width = trial.suggest_int("width", 8, 64)
    model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 2))
    optimizer = partial(torch.optim.AdamW, lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True))
    return ht.Candidate(model=model, loss=nn.functional.cross_entropy, optimizer=optimizer, train=data, valid=data,
                        batch_size=10, epochs=2)
"""
TRIALS = 2


def run(folder: Path, point: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the folder, to be killed at a point."""
    variable = f"{folder / 'points'}:{point}" if point else str(folder / "points")
    return subprocess.run(
        [sys.executable, "-m", "hydra_tune", *words], cwd=folder, capture_output=True, text=True, check=False,
        stdin=subprocess.DEVNULL, env={**os.environ, VARIABLE: variable}, timeout=600,
    )  # fmt: skip


def search(folder: Path, strategy: str, point: str) -> tuple[str, list[str]]:
    """Search, and resume if the coordinator was killed; return what was said, and what went wrong."""
    for name in ("points", "spill"):
        (folder / name).mkdir(parents=True)
    (folder / "spec.py").write_text(SPEC)
    flags = ["--study", "s", "--trials", str(TRIALS), "--sampler", "random", "--seed", "7", "--devices", "1xcpu"]
    flags += ["--strategy", strategy, "--checkpoint-seconds", "0.05", "--spill", str(folder / "spill")]
    done = run(folder, point, "search", "spec.py:build", *flags)
    said, wrong = done.stderr, list[str]()
    if done.returncode == -9:
        begun = (folder / "hydra_tune.db").exists() and "study s:" in said
        again = ["resume", "s"] if begun else ["search", "spec.py:build", *flags]
        done = run(folder, "", *again)
        if not begun and "exists already" in done.stderr:  # killed after the study was made, before it was shown
            done = run(folder, "", "resume", "s")
        said += done.stderr
    if done.returncode != 0:
        wrong.append(f"exit {done.returncode}: {done.stderr.splitlines()[-1:]}")
    return said, wrong


def result(folder: Path) -> list[Any]:
    """Return parameters, values, reports and the weights' checksums."""
    with open_storage(f"sqlite:///{folder}/hydra_tune.db", read_only=True) as storage:
        records = trial_records(storage, "s")
        trials = storage.get_all_trials(storage.get_study_id_from_name("s"))
    weights = sorted((folder / "hydra_tune_files" / "study-1").glob("*.safetensors"))
    sums = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in weights]
    reports = [sorted(trial.intermediate_values.items()) for trial in trials]
    return [[(each.number, each.state, each.params, each.value) for each in records], reports, sums]


def left_over(folder: Path) -> list[str]:
    """Return processes, run directories and checkpoints that stayed behind."""
    end = time.monotonic() + 10
    while (alive := list(_processes(folder))) and time.monotonic() < end:
        time.sleep(0.1)
    for process in alive:
        process.kill()
    files = [*(folder / "spill").iterdir(), *folder.glob("hydra_tune_files/*/*.checkpoints")]
    return [f"process {process.pid}" for process in alive] + [str(file) for file in files]


def _processes(folder: Path) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.environ().get(VARIABLE, "").startswith(str(folder)):
                yield process
        except psutil.Error:
            continue


def points_of(folder: Path) -> list[str]:
    """Return all points that the processes of an unbroken search reached."""
    found = []
    for file in sorted((folder / "points").glob("*.count")):
        role = file.stem.rsplit("-", 1)[0]
        found += [f"{role}:{number}" for number in range(1, int(file.read_text() or 0) + 1)]
    return found


def main() -> None:
    """Kill at every point, or at a sample."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="whole", choices=["whole", "shard", "pipeline", "sparse", "ist"])
    parser.add_argument("--sample", type=int, help="how many points; default all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a sample of three points")
    options = parser.parse_args()
    counts = {"points": 0, "lost": 0, "different": 0, "left_over": 0}
    with tempfile.TemporaryDirectory(prefix="crash-points-") as name:
        place = Path(name)
        _, wrong = search(place / "unbroken", options.strategy, "")
        assert not wrong, wrong
        expected, points = result(place / "unbroken"), points_of(place / "unbroken")
        print(f"{len(points)} points of {options.strategy}", flush=True)
        size = 3 if options.quick else options.sample
        chosen = points if size is None else random.Random(options.seed).sample(points, min(size, len(points)))
        for point in chosen:
            folder = place / point.replace(":", "-")
            said, wrong = search(folder, options.strategy, point)
            shown = {int(line.split("trial ")[1].split()[0]) for line in said.splitlines() if " COMPLETE " in line}
            found = result(folder)
            stored = {number for number, state, *_ in found[0] if state == "COMPLETE"}
            left = left_over(folder)
            counts["points"] += 1
            counts["lost"] += bool(shown - stored)
            counts["different"] += bool(wrong) or found != expected
            counts["left_over"] += bool(left)
            reached = (folder / "points" / "killed").exists()
            verdict = "; ".join([*wrong, *left, *(["another result"] if found != expected else [])]) or "as unbroken"
            print(f"{point:>16} {'killed' if reached else 'not reached'}: {verdict}", flush=True)
    rows = [(name.replace("_", " "), str(count)) for name, count in counts.items()]
    finish(rows, {"strategy": options.strategy, "of": len(points), **counts})


if __name__ == "__main__":
    main()
