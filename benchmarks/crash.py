"""A seeded killer: kill -9 the coordinator, a worker or the template at random instants of a search, resume, compare.

Expected: no result lost or duplicated, the database intact after every kill, and the same metrics as an undisturbed
run.

    python -m benchmarks.crash --kills 50
    python -m benchmarks.crash --kills 1200 --strategy mixed --minutes 60

With `--strategy mixed`, searches of one strategy after another are killed, `ROUND` kills each. After `--minutes` no
other search begins.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
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
from dataclasses import dataclass, field
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


STRATEGIES = ("whole", "shard", "pipeline", "sparse", "ist")
"""The strategies of `mixed`."""
ROUND = 20
"""Kills of one search."""


def search_command(trials: int, strategy: str) -> list[str]:
    return command(
        "search", "spec.py:build", "--study", "s", "--trials", str(trials), "--sampler", "random", "--seed", "7",
        "--devices", "2xcpu", "--checkpoint-seconds", "0.5", "--strategy", strategy, "-q", "--json",
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

    def __init__(self, folder: Path, trials: int, kills: int, seed: int, strategy: str) -> None:
        self.folder = folder
        self.kills_left = kills
        self.chance = random.Random(seed)
        self.arguments = search_command(trials, strategy)
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


@dataclass
class Tally:
    """Sums over all searches that were killed."""

    kills: int = 0
    searches: int = 0
    lost: int = 0
    duplicated: int = 0
    damaged: int = 0
    equal: bool = True
    left: int = 0
    recoveries: dict[str, list[float]] = field(default_factory=lambda: {"worker": [], "coordinator": []})

    def add(self, killer: Killer, expected: dict[int, Any]) -> None:
        """Add a search that has come to its end; `expected` are the results of the unbroken one."""
        killer.check()
        found = results(killer.folder)
        self.kills += killer.kills
        self.searches += 1
        self.lost += killer.lost + len(expected.keys() - found.keys())
        self.duplicated += sum(len(values) > 1 for values in found.values()) + len(found.keys() - expected.keys())
        self.damaged += killer.damaged
        self.equal = self.equal and found == expected
        self.left += len(list(killer.folder.glob("hydra_tune_files/*/*.checkpoints")))
        for victim, seconds in killer.recoveries.items():
            self.recoveries[victim] += seconds

    def document(self) -> dict[str, Any]:
        recoveries = [seconds for each in self.recoveries.values() for seconds in each]
        return {
            "kills": self.kills,
            "searches": self.searches,
            "lost_results": self.lost,
            "duplicated_results": self.duplicated,
            "integrity_failures": self.damaged,
            "metrics_equal_to_unbroken_run": self.equal,
            "left_over_checkpoints": self.left,
            "recovery_seconds_p50": round(statistics.median(recoveries), 3) if recoveries else None,
            "recovery_seconds_p95": round(_p95(recoveries), 3) if recoveries else None,
            **{
                f"{victim}_recovery_seconds_p50": round(statistics.median(seconds), 3)
                for victim, seconds in self.recoveries.items()
                if seconds
            },
        }


def unbroken(place: Path, strategy: str, trials: int) -> dict[int, Any]:
    """Return the results of a search that nobody disturbs."""
    folder = place / f"unbroken-{strategy}-{trials}"
    if not folder.exists():
        folder.mkdir()
        (folder / "spec.py").write_text(SPEC)
        subprocess.run(search_command(trials, strategy), cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return results(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", default="auto", choices=["auto", "mixed", *STRATEGIES])
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no search after so many minutes")
    parser.add_argument("--quick", action="store_true", help="five kills")
    options = parser.parse_args()
    wanted = 5 if options.quick else options.kills
    mixed = options.strategy == "mixed"
    strategies = itertools.cycle(STRATEGIES if mixed else [options.strategy])
    tally, end = Tally(), time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        while tally.kills < wanted and time.monotonic() < end:
            strategy, left = next(strategies), wanted - tally.kills
            kills = min(left, ROUND) if mixed else left
            trials = 2 * kills + 4  # enough that the last kill still disturbs something
            expected = unbroken(place, strategy, trials)
            folder = place / f"broken-{tally.searches}"
            folder.mkdir()
            (folder / "spec.py").write_text(SPEC)
            killer = Killer(folder, trials, kills, options.seed + tally.searches, strategy)
            killer.run()
            tally.add(killer, expected)
            print(f"{strategy}: {tally.kills} kills, {tally.lost} lost, all equal: {tally.equal}", flush=True)
    document = {"strategy": options.strategy, **tally.document()}
    finish([(name, json.dumps(value)) for name, value in document.items()], document)


def _p95(seconds: list[float]) -> float:
    """Return the 95th percentile; of a single time, that time."""
    return statistics.quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]


if __name__ == "__main__":
    main()
