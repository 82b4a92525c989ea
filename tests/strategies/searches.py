"""Searches by one strategy, run as processes that lose workers or are killed, and checks of their results."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hydra_tune as ht
from hydra_tune.core.devices import cores
from tests.candidates import plain_loop
from tests.fault.searches import run, started, wait_for, wait_for_checkpoint

ONE_THREAD = f"{cores()}xcpu"
SPEC = Path(__file__).parent / "sharded_candidates.py"


def search_of(*flags: str) -> list[str]:
    """Return the command of a search `s` of two trials on two devices, whose workers note when they build and train."""
    common = ["--trials", "2", "--sampler", "random", "--seed", "4", "--devices", "2xcpu", "--study", "s"]
    return ["search", f"{SPEC}:build", *common, *flags]


def rows(count: int) -> TensorDataset:
    inputs = torch.randn(count, 32, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def candidate(*layers: nn.Module, **fields: Any) -> ht.Candidate:
    """Return a candidate of these layers in float64, with some fields replaced."""
    given: dict[str, Any] = {
        "model": nn.Sequential(*layers).double(), "loss": F.cross_entropy,
        "optimizer": partial(torch.optim.AdamW, lr=0.01), "train": rows(43), "valid": rows(16), "batch_size": 10,
        "epochs": 2,
    }  # fmt: skip
    return ht.Candidate(**(given | fields))


def search_here(strategy: str, build: Any, study: str, /, **options: Any) -> ht.SearchResult:
    """Search from this process by a strategy; `options` may have the strategy's own under `strategy`."""
    chosen = {"name": strategy, **options.pop("strategy", {})}
    given: dict[str, Any] = {"trials": 1, "seed": 5, "progress": False, "study": study}
    return ht.search(build, strategy=chosen, **(given | options))


def equals_the_plain_loop(result: ht.SearchResult, build: Any) -> None:
    """Compare the best model with a plain loop over `build(None)`, to 1e-9."""
    seed = result.best_trial.seed
    torch.manual_seed(seed)
    expected, _losses = plain_loop(build(None), seed)
    found = result.best_model().state_dict()
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def events(folder: Path) -> list[tuple[str, str]]:
    with closing(sqlite3.connect(folder / "hydra_tune.db")) as connection:
        return connection.execute("SELECT kind, message FROM hydra_events").fetchall()


def attempts(folder: Path) -> int:
    """Return the number of attempts of all trials."""
    with closing(sqlite3.connect(folder / "hydra_tune.db")) as connection:
        found: tuple[int] = connection.execute("SELECT COUNT(*) FROM hydra_attempts").fetchone()
        return found[0]


def pids(folder: Path, what: str) -> set[int]:
    return {int(path.name.rpartition("-")[2]) for path in folder.glob(f"{what}-*")}


def training(folder: Path) -> set[int]:
    """Return the workers that have begun to train, without the builder."""
    return pids(folder, "trains") - pids(folder, "builds")


def nothing_is_left(search: subprocess.Popen[str]) -> None:
    assert not list(Path("/dev/shm").glob(f"hydra-tune-search-{search.pid}-*"))


def run_and_lose(*search: str, folder: Path, every: bool = False, at_checkpoint: bool = False) -> None:
    """Run a search to its end; kill one of the training workers, or `every` one, on request after a checkpoint."""
    with started(*search, folder=folder) as going:
        if at_checkpoint:
            wait_for_checkpoint(folder)
        found = wait_for(lambda: training(folder), "training")
        for pid in found if every else [found.pop()]:
            os.kill(pid, signal.SIGKILL)
        _, errors = going.communicate()
    assert going.returncode == 0, errors
    nothing_is_left(going)


def stop_and_resume(*search: str, folder: Path, how: signal.Signals = signal.SIGKILL) -> str:
    """Stop a search by a signal once there is a checkpoint, then resume it; return what `resume --json` printed."""
    with started(*search, folder=folder) as going:
        wait_for_checkpoint(folder)
        going.send_signal(how)
        going.communicate()
    resumed = run("resume", "s", "--json", folder=folder)
    assert resumed.returncode == 0, resumed.stderr
    return resumed.stdout
