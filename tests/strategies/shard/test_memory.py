"""A worker's memory, measured from outside, stays within its device's budget for a model of eight times that state."""

from __future__ import annotations

import json
import subprocess
from contextlib import suppress
from pathlib import Path

from tests.fault.searches import started, wait_for

MIB = 2**20
BUDGET = 256 * MIB
WIDTH, LAYERS = 2048, 43

CANDIDATE = f"""
import os
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hydra_tune as ht


def loss(outputs, targets):
    Path(f"trains-{{os.getpid()}}").touch()
    return nn.functional.cross_entropy(outputs, targets)


def layer():
    made = nn.utils.skip_init(nn.Linear, {WIDTH}, {WIDTH})
    for parameter in made.parameters():
        nn.init.zeros_(parameter)
    return made


def build(trial):
    # Trial 0 is small: after it the worker has imported all that training needs, and is idle.
    Path(f"trial-{{trial.number}}-{{os.getpid()}}").touch()
    layers = [module for _ in range({LAYERS} if trial.number else 1) for module in (layer(), nn.ReLU())]
    rows = torch.randn(32, {WIDTH}, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(rows, (rows[:, 0] > 0).long())
    return ht.Candidate(
        model=nn.Sequential(*layers, nn.Linear({WIDTH}, 2)), loss=loss, optimizer=partial(torch.optim.Adam, lr=1e-4),
        train=data, batch_size=16, epochs=1,
    )
"""
FLAGS = [
    "--trials", "2", "--concurrency", "1", "--devices", "1xcpu", "--strategy", "shard", "--device-memory", "256MiB",
    "--study", "s", "--checkpoint-seconds", "1000", "-q", "--json",
]  # fmt: skip


def memory_of(pid: int, field: str) -> int:
    """`VmHWM`, `VmRSS` and so on, in bytes; 0 for a process that has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return 0


def pid_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def test_a_workers_memory_stays_within_the_budget(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text(CANDIDATE)
    with started("search", "large.py:build", *FLAGS, folder=tmp_path) as search:
        builder = pid_of(wait_for(lambda: next(tmp_path.glob("trial-1-*"), None), "the large build"))
        (device,) = {pid_of(path) for path in tmp_path.glob("trains-*")} - {builder}
        idle = memory_of(device, "VmRSS")
        peak = 0
        while search.poll() is None:
            peak = max(peak, memory_of(device, "VmHWM"))
            with suppress(subprocess.TimeoutExpired):
                search.wait(0.02)
        printed, errors = search.communicate()
    assert search.returncode == 0, errors
    small, large = json.loads(printed)["trials"]
    assert {small["state"], large["state"]} == {"COMPLETE"}
    assert 3 * 4 * LAYERS * WIDTH * (WIDTH + 1) > 8 * BUDGET, "parameters and Adam's state"
    assert BUDGET / 2 < peak - idle < BUDGET + max(0.15 * BUDGET, 64 * MIB), f"{(peak - idle) / MIB:.0f} MiB"
