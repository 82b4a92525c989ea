"""Checks whether this machine's devices do what strategies promise: `hydra-tune doctor --devices`.

A small model is trained by a plain loop and by each exact strategy on each device, and the validation losses compared.
Bandwidths, the overlap of copies with compute, and recovery after the device's own out-of-memory error are measured in
a worker, as a trial's objective. Everything is in a temporary folder.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hydra_tune.coordinator.search import search
from hydra_tune.core.devices import parse_devices
from hydra_tune.core.errors import HydraTuneError
from hydra_tune.engine.template_client import SHARED, shared_template
from hydra_tune.training.batches import epoch_order
from hydra_tune.training.candidate import Candidate

EXACT: dict[str, Any] = {
    "whole": "whole", "shard": "shard", "pipeline": {"name": "pipeline", "microbatches": 1},
    "ist": {"name": "ist", "subnets": 1, "local_steps": 3},
}  # fmt: skip
"""Strategies that must give the plain loop's loss."""
OTHERS: dict[str, Any] = {"sparse": "sparse", "elastic": {"name": "elastic", "tau": 3}}
"""Strategies that train otherwise than a plain loop, and must only finish."""
TOLERANCE = 1e-6
"""Largest difference of validation losses in float64; of devices without it, 1000 times as much."""
SEED = 7
MOVED = 64 * 2**20
"""Bytes moved to measure a bandwidth."""


@dataclass
class Verdict:
    """The findings of the check of one device."""

    device: str
    strategies: dict[str, str] = field(default_factory=dict)
    """By strategy: `same`, `trained`, or what went wrong."""
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if every strategy did what it promises, and an out-of-memory error was recovered from."""
        return set(self.strategies.values()) <= {"same", "trained"} and self.measured.get("recovers") is not False


def check_devices() -> list[Verdict]:
    """Check each accelerator of this machine, or one CPU device where there is none."""
    names = [device.name for device in parse_devices("auto")]
    names = ["cpu"] if names[0].startswith("cpu") else names
    with tempfile.TemporaryDirectory() as folder, _one_template(Path(folder) / "template"):
        return [_checked(name, folder) for name in names]


@contextmanager
def _one_template(path: Path) -> Iterator[None]:
    """Let all searches within fork their workers from one template, where that is done at all."""
    if sys.platform != "linux" or SHARED in os.environ:
        yield
        return
    with shared_template(str(path), ("torch", "hydra_tune.strategies.registry")):
        os.environ[SHARED] = str(path)
        try:
            yield
        finally:
            del os.environ[SHARED]


def _checked(name: str, folder: str) -> Verdict:
    verdict = Verdict(name)
    run = partial(_run, name, folder)
    try:
        measured = run(_measure, None)
        expected = run(_plain, None).value
    except HydraTuneError as error:
        verdict.strategies["plain loop"] = str(error)
        return verdict
    verdict.measured = dict(measured.user_attrs)
    tolerance = TOLERANCE * (1 if _dtype(name) is torch.float64 else 1000)
    for strategy, given in (EXACT | OTHERS).items():
        try:
            found = run(_candidate, given).value
        except HydraTuneError as error:
            verdict.strategies[strategy] = str(error)
            continue
        differs = strategy in EXACT and abs(found - expected) > tolerance
        said = "same" if strategy in EXACT else "trained"
        verdict.strategies[strategy] = f"loss {found} instead of {expected}" if differs else said
    return verdict


def _run(device: str, folder: str, build: Any, strategy: Any) -> Any:
    """Return the record of a search's only trial."""
    files = tempfile.mkdtemp(dir=folder)
    options: dict[str, Any] = {} if strategy is None else {"strategy": strategy}
    result = search(
        build, trials=1, devices=device, seed=SEED, progress=False, storage=f"sqlite:///{Path(files) / 'check.db'}",
        **options,
    )  # fmt: skip
    try:
        return result.best_trial
    finally:
        result.close()


def _dtype(device: str) -> torch.dtype:
    return torch.float32 if device.startswith("mps") else torch.float64


# In a worker


def _device() -> torch.device:
    """Return the device of this worker, its process's default accelerator."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if kind is None else torch.device(kind.type, torch.accelerator.current_device_index())


def _rows(count: int, dtype: torch.dtype) -> TensorDataset:
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(count)).to(dtype)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def _candidate(_trial: Any) -> Candidate:
    # The builder has no accelerator, and builds for a device that may be one without float64.
    dtype = torch.float32 if torch.backends.mps.is_available() else torch.float64
    layers = (nn.Linear(8, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh())
    model = nn.Sequential(*layers, nn.Linear(32, 2)).to(dtype)
    return Candidate(
        model=model, loss=nn.functional.cross_entropy, optimizer=partial(torch.optim.AdamW, lr=0.01),
        train=_rows(60, dtype), valid=_rows(20, dtype), batch_size=10, epochs=2,
    )  # fmt: skip


def _plain(trial: Any) -> float:
    """Train the candidate with a plain loop on the device; return its validation loss."""
    device, seed = _device(), torch.initial_seed()
    made = _candidate(trial)
    dtype = next(made.model.parameters()).dtype
    model, data = made.model.to(device), _rows(60, dtype)
    parameters = list(model.parameters())
    optimizer: Any = torch.optim.AdamW(parameters, lr=0.01)
    for epoch in range(made.epochs):
        order: Any = epoch_order(len(data), seed, epoch)
        for batch in order.split(made.batch_size):
            inputs, targets = (tensor.to(device) for tensor in data[batch])
            loss: Any = made.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    inputs, targets = (tensor.to(device) for tensor in _rows(20, dtype)[:])
    with torch.no_grad():
        return float(made.loss(model(inputs), targets))


def _measure(trial: Any) -> float:
    """Measure the device; the figures are the trial's attributes."""
    device = _device()
    if device.type == "cpu":
        source, target = torch.ones(MOVED // 4), torch.empty(MOVED // 4)
        trial.set_user_attr("copy_bytes_per_second", MOVED / _seconds(lambda: target.copy_(source), device))
        return 0.0
    host = torch.ones(MOVED, dtype=torch.uint8).pin_memory()
    held = torch.empty(MOVED, dtype=torch.uint8, device=device)
    copies = torch.Stream(device)
    matrix = torch.ones(512, 512, device=device)

    def copy() -> None:
        with copies:
            held.copy_(host, non_blocking=True)

    def compute() -> None:
        for _ in range(16):
            matrix @ matrix

    def both() -> None:
        copy()
        compute()

    copying, computing, together = (_seconds(work, device) for work in (copy, compute, both))
    trial.set_user_attr("to_device_bytes_per_second", MOVED / copying)
    back = _seconds(lambda: host.copy_(held, non_blocking=True), device)
    trial.set_user_attr("to_host_bytes_per_second", MOVED / back)
    hidden = (copying + computing - together) / min(copying, computing)
    trial.set_user_attr("overlap", round(max(0.0, min(1.0, hidden)), 3))
    trial.set_user_attr("recovers", _recovers(device))
    return 0.0


def _seconds(work: Any, device: torch.device) -> float:
    """Return the shorter time of two runs of the work after a first one."""
    found = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        found.append(time.perf_counter() - began)
    return max(1e-9, min(found[1:]))


def _recovers(device: torch.device) -> bool:
    """True if asking for more memory than there is raises torch's own error, and the device goes on."""
    _free, total = torch.accelerator.get_memory_info(device)
    try:
        torch.empty(total * 2, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        torch.accelerator.empty_cache()
        return float(torch.ones(8, device=device).sum()) == 8.0
    return False
