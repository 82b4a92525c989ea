"""Starting up: the wall time of whole processes, from the command to the result, and the time to replace a worker.

(a) Three trivial trials without torch, against a plain Optuna script that writes them to SQLite. (b) One candidate that
trains a fifth of a second on digits, against a plain script that imports torch and trains the same. (c) The time from
SIGKILL of a worker to the first unit of its replacement.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import arguments, finish, interleaved, ratios, spread
from hydra_tune.core.devices import Device
from hydra_tune.core.errors import WorkerLost
from hydra_tune.engine.engine import Engine
from hydra_tune.engine.unit import Role, Unit
from hydra_tune.engine.worker import WorkerContext

OBJECTIVE = """
def objective(trial):
    return (trial.suggest_float("x", -1, 1) - 0.3) ** 2
"""
OPTUNA = """
import optuna
from objective import objective

optuna.logging.set_verbosity(optuna.logging.WARNING)
study = optuna.create_study(storage="sqlite:///optuna.db")
study.optimize(objective, n_trials=3)
print(study.best_value)
"""
STEPS, BATCH = 550, 64
MODEL = f"""
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

def parts():
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return data, model, nn.functional.cross_entropy, partial(torch.optim.AdamW, lr=1e-3)
EPOCHS, BATCH = {STEPS} // (1797 // {BATCH} + 1), {BATCH}
"""
CANDIDATE = """
import hydra_tune as ht
from model import BATCH, EPOCHS, parts

def build(trial):
    data, model, loss, optimizer = parts()
    return ht.Candidate(model=model, loss=loss, optimizer=optimizer, train=data, batch_size=BATCH, epochs=EPOCHS)
"""
SCRIPT = """
import torch
from model import BATCH, EPOCHS, parts

torch.set_num_threads(1)
data, model, loss, optimizer = parts()
optimizer = optimizer(model.parameters())
for epoch in range(EPOCHS):
    for inputs, targets in torch.utils.data.DataLoader(data, BATCH, shuffle=True):
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        optimizer.step()
torch.save(model.state_dict(), "model.pt")
print(float(value))
"""
FILES = {"objective": OBJECTIVE, "plain_optuna": OPTUNA, "model": MODEL, "candidate": CANDIDATE, "script": SCRIPT}


ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""Environment that keeps compiled modules, as Python does by default."""


def seconds(folder: Path, *command: str) -> float:
    """Return the wall time of a process in seconds."""
    for database in folder.glob("*.db*"):
        database.unlink()
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, env=ENVIRONMENT)
    took = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with code {done.returncode}: {done.stderr}")
    return took


def search(folder: Path, source: str, trials: int) -> float:
    return seconds(folder, "-m", "hydra_tune", "search", source, "--trials", str(trials), "-q", "--json")


class Nobody:
    """An observer that ignores everything."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def own_pid(context: WorkerContext) -> int:
    return os.getpid()


def replace_worker_ms(folder: Path) -> float:
    """Return the milliseconds from SIGKILL of an idle worker until its replacement has run a unit."""

    async def measure() -> float:
        async with Engine([Device("cpu:0", "cpu", 2**30, 1)], Nobody(), directory=str(folder), warm=WARM) as engine:
            victim = (await engine.run(_unit())).value
            began = time.perf_counter()
            os.kill(victim, signal.SIGKILL)
            while True:
                try:
                    if (await engine.run(_unit())).value != victim:
                        return 1000 * (time.perf_counter() - began)
                except WorkerLost:
                    continue

    return asyncio.run(measure())


WARM = {Role.DEVICE: ("torch", "torch._dynamo")}


def _unit() -> Unit:
    from benchmarks import startup  # workers can import this file's functions from here, but not from __main__

    return Unit(trial=0, attempt="a", kind="test", work=startup.own_pid, args=())


def main() -> None:
    options = arguments(__doc__ or "")
    rounds = options.rounds or (1 if options.quick else 5)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, text in FILES.items():
            (folder / f"{name}.py").write_text(text)
        measured = interleaved(
            {
                "optuna_seconds": lambda: seconds(folder, "plain_optuna.py"),
                "objective_seconds": lambda: search(folder, "objective.py:objective", 3),
                "script_seconds": lambda: seconds(folder, "script.py"),
                "candidate_seconds": lambda: search(folder, "candidate.py:build", 1),
                "replace_worker_ms": lambda: replace_worker_ms(folder),
            },
            rounds,
        )
    everything = {
        "objective_vs_optuna": ratios(measured["objective_seconds"], measured["optuna_seconds"]),
        "candidate_vs_script": ratios(measured["candidate_seconds"], measured["script_seconds"]),
        **measured,
    }
    finish(
        [*((name, spread(values)) for name, values in everything.items()), ("load", f"{psutil.getloadavg()[0]:.1f}")],
        {name: round(statistics.median(values), 3) for name, values in everything.items()},
    )


if __name__ == "__main__":
    main()
