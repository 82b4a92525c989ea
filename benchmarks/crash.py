"""A seeded killer: kill -9 the coordinator, a worker or the template at random instants of a search, resume, compare.

Expected: no result lost or duplicated, the database intact after every kill, and the same metrics as an undisturbed
run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import finish
from hydra_tune.engine.template_client import SHARED

SPEC = """
import time
from functools import partial
import torch
from torch import nn
from torch.utils.data import TensorDataset
import hydra_tune as ht

class Slow(nn.Module):
    def forward(self, x):
        if self.training:
            time.sleep(0.004)
        return x

def build(trial):
    rows = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(rows, (rows[:, 0] * rows[:, 1] > 0).long())
    width = trial.suggest_int("width", 8, 64)
    model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), Slow(), nn.Dropout(0.3), nn.Linear(width, 2))
    optimizer = partial(torch.optim.AdamW, lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True))
    return ht.Candidate(model=model, loss=nn.functional.cross_entropy, optimizer=optimizer, train=data, valid=data,
                        batch_size=10, epochs=12, keep="best")
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hydra_tune", *arguments]


def search_command(trials: int) -> list[str]:
    return command(
        "search", "spec.py:build", "--study", "s", "--trials", str(trials), "--sampler", "random", "--seed", "7",
        "--devices", "2xcpu", "--checkpoint-seconds", "0.5", "-q", "--json",
    )  # fmt: skip


def results(folder: Path) -> dict[int, Any]:
    """Return the finished trials in the database."""
    query = "SELECT number, value FROM trials JOIN trial_values USING (trial_id) WHERE state = 'COMPLETE'"
    with closing(sqlite3.connect(f"file:{folder}/hydra_tune.db?mode=ro", uri=True)) as connection:
        found = connection.execute(query).fetchall()
    values: dict[int, Any] = {}
    for number, value in found:
        values.setdefault(number, []).append(value)
    return values


def integrity(folder: Path) -> bool:
    with closing(sqlite3.connect(folder / "hydra_tune.db")) as connection:
        return bool(connection.execute("PRAGMA integrity_check").fetchone() == ("ok",))


def templates(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the process from which a search forks its workers, if it runs."""
    try:
        children = psutil.Process(process.pid).children()
        return [child for child in children if "hydra_tune.engine.template" in child.cmdline()]
    except psutil.NoSuchProcess:
        return []


def workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the workers and the builder of a search."""
    try:
        return [worker for template in templates(process) for worker in template.children()]
    except psutil.NoSuchProcess:
        return []


class Killer:
    """Disturbs one search until enough kills are done; then lets it end."""

    def __init__(self, folder: Path, trials: int, kills: int, seed: int) -> None:
        self.folder = folder
        self.kills_left = kills
        self.chance = random.Random(seed)
        self.arguments = search_command(trials)
        self.acknowledged: dict[int, Any] = {}
        self.lost = self.damaged = self.kills = 0
        self.recoveries: dict[str, list[float]] = {"worker": [], "coordinator": []}

    def run(self) -> None:
        process = self._start()
        while process.poll() is None and self.kills_left:
            time.sleep(self.chance.uniform(0.3, 2.5))
            if process.poll() is not None:
                break
            victim = self.chance.choice(["worker", "worker", "coordinator", "coordinator", "template"])
            if victim == "worker":
                self._kill_worker(process)
            elif victim == "template":
                self._kill_template(process)
            else:
                process = self._kill_coordinator(process)
        code = process.wait()
        if code:
            raise SystemExit(f"the search ended with code {code}: {process.stderr.read() if process.stderr else ''}")

    def _start(self) -> subprocess.Popen[str]:
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        own_template = {name: value for name, value in os.environ.items() if name != SHARED}
        return subprocess.Popen(self.arguments, cwd=self.folder, text=True, env=own_template, **quiet)  # type: ignore[call-overload,no-any-return]

    def _kill_worker(self, process: subprocess.Popen[str]) -> None:
        alive = workers(process)
        if alive:
            self._count()
            began = time.monotonic()
            units = self._units()
            self.chance.choice(alive).kill()
            self._wait_for_units("worker", units, process, began)

    def _kill_template(self, process: subprocess.Popen[str]) -> None:
        """Kill the template; its workers go on, so there is no recovery to measure."""
        for template in templates(process):
            self._count()
            template.kill()

    def _kill_coordinator(self, process: subprocess.Popen[str]) -> subprocess.Popen[str]:
        if not (self.folder / "hydra_tune.db").exists() or not self._units():
            return process  # nothing to resume yet
        self._count()
        began = time.monotonic()
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        self.check()
        units = self._units()
        self.arguments = command("resume", "s", "-q", "--json")
        process = self._start()
        self._wait_for_units("coordinator", units, process, began)
        return process

    def _count(self) -> None:
        self.kills += 1
        self.kills_left -= 1

    def check(self) -> None:
        """Check that all acknowledged results are still there and the file is intact."""
        self.damaged += not integrity(self.folder)
        now = results(self.folder)
        self.lost += sum(now.get(number) != value for number, value in self.acknowledged.items())
        self.acknowledged = now

    def _units(self) -> int:
        try:
            with closing(sqlite3.connect(f"file:{self.folder}/hydra_tune.db?mode=ro", uri=True)) as connection:
                return int(connection.execute("SELECT COUNT(*) FROM hydra_units").fetchone()[0])
        except sqlite3.OperationalError:
            return 0

    def _wait_for_units(self, victim: str, before: int, process: subprocess.Popen[str], began: float) -> None:
        """Wait until training continues or the search ends, and record the recovery time."""
        while process.poll() is None and self._units() <= before:
            time.sleep(0.02)
        self.recoveries[victim].append(time.monotonic() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="five kills")
    options = parser.parse_args()
    kills = 5 if options.quick else options.kills
    trials = 2 * kills + 4  # enough that the last kill still disturbs something
    with tempfile.TemporaryDirectory() as place:
        unbroken, broken = Path(place, "unbroken"), Path(place, "broken")
        for folder in (unbroken, broken):
            folder.mkdir()
            (folder / "spec.py").write_text(SPEC)
        subprocess.run(search_command(trials), cwd=unbroken, check=True, stdout=subprocess.DEVNULL)
        killer = Killer(broken, trials, kills, options.seed)
        killer.run()
        killer.check()
        expected, found = results(unbroken), results(broken)
        left = list(broken.glob("hydra_tune_files/*/*.checkpoints"))
    recoveries = [seconds for each in killer.recoveries.values() for seconds in each]
    document = {
        "kills": killer.kills,
        "lost_results": killer.lost + len(expected.keys() - found.keys()),
        "duplicated_results": sum(len(values) > 1 for values in found.values()) + len(found.keys() - expected.keys()),
        "integrity_failures": killer.damaged,
        "metrics_equal_to_unbroken_run": found == expected,
        "left_over_checkpoints": len(left),
        "recovery_seconds_p50": round(statistics.median(recoveries), 3),
        "recovery_seconds_p95": round(_p95(recoveries), 3),
        **{
            f"{victim}_recovery_seconds_p50": round(statistics.median(seconds), 3)
            for victim, seconds in killer.recoveries.items()
            if seconds
        },
    }
    finish([(name, json.dumps(value)) for name, value in document.items()], document)


def _p95(seconds: list[float]) -> float:
    """Return the 95th percentile; of a single time, that time."""
    return statistics.quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]


if __name__ == "__main__":
    main()
