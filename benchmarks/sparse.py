"""A pruned network with compressed state against the dense one: digits, an MLP 64-512-512-10, five seeds.

All train the same number of epochs on the same batches, the search for the mask included. `early-bird` is Hydra Tune's
default at 90% sparsity in mixed precision, `random` has masks drawn by chance from the start, `dense` is the plain
loop in float32. Bytes are counted from the tensors' storages; those of ZeRO-1 on n devices, 4 + 16/n for each weight,
are computed. Step times are medians, of all three in turn.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import hydra_tune as ht
from benchmarks.report import arguments, finish, spread
from hydra_tune.core.seeds import seed_everything
from hydra_tune.strategies.sparse.pruning import Pruning
from hydra_tune.strategies.sparse.training import SparseTraining
from hydra_tune.training.loop import Training
from hydra_tune.training.prepared import Prepared

SPARSITY, EPOCHS, BATCH, TEST_ROWS = 0.9, 60, 64, 540


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == targets).float().mean()


def candidate(seed: int, epochs: int) -> ht.Candidate:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    inputs, targets = torch.tensor(images / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]
    seed_everything(seed)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return ht.Candidate(
        model=model, loss=nn.functional.cross_entropy, optimizer=partial(torch.optim.AdamW, lr=3e-3),
        scheduler=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=epochs),
        train=TensorDataset(inputs[TEST_ROWS:], targets[TEST_ROWS:]),
        valid=TensorDataset(inputs[:TEST_ROWS], targets[:TEST_ROWS]), batch_size=BATCH, epochs=epochs,
        metrics={"accuracy": accuracy},
    )  # fmt: skip


def begun(kind: str, seed: int, epochs: int) -> Training:
    made = candidate(seed, epochs)
    if kind == "dense":
        return Training(made, made.train, made.valid, seed, torch.device("cpu"))
    pruning = Pruning(sparsity=SPARSITY, mask=kind, dense_epochs=epochs // 5, least=8)
    return SparseTraining(Prepared(made, made.train, made.valid), seed, torch.device("cpu"), pruning, 0, 1)


def trained(kind: str, seed: int, epochs: int) -> tuple[Training, float, list[float]]:
    """Train to the end; return the training, the final accuracy in percent, and the step seconds of each epoch."""
    training = begun(kind, seed, epochs)
    seconds = []
    for _ in range(epochs):
        clock = time.perf_counter()
        batches = len(training.batches)
        if isinstance(training, SparseTraining):
            training.look_for_mask()
            training.train_batches(batches)
        else:
            training.train_for(3600)
        seconds.append((time.perf_counter() - clock) / batches)
        training.end_epoch()
    return training, 100 * training.history[-1]["accuracy"], seconds


def main() -> None:
    options = arguments(__doc__ or "")
    torch.set_num_threads(1)
    seeds = options.rounds or (1 if options.quick else 5)
    epochs = 10 if options.quick else EPOCHS
    found: dict[str, list[float]] = {}
    accounts: dict[str, Any] = {}
    for seed in range(seeds):
        steps = {}
        for kind in ("dense", "early-bird", "random"):
            training, percent, seconds = trained(kind, seed, epochs)
            found.setdefault(f"accuracy, {kind}", []).append(percent)
            steps[kind] = statistics.median(seconds[epochs // 2 :])
            if isinstance(training, SparseTraining):
                accounts[kind] = training.account()
        for kind in ("early-bird", "random"):
            gap = found["accuracy, dense"][-1] - found[f"accuracy, {kind}"][-1]
            found.setdefault(f"accuracy gap in points, {kind}", []).append(gap)
        found.setdefault("step time against dense", []).append(steps["early-bird"] / steps["dense"])
        print(f"seed {seed}: " + ", ".join(f"{name} {values[-1]:.2f}" for name, values in found.items()), flush=True)
    _report(found, accounts["early-bird"])


def _report(found: dict[str, list[float]], account: Any) -> None:
    numbers = account.dense_state_bytes // 20
    zero = {n: (4 + 16 / n) * numbers for n in (2, 4, 8)}
    rows = [(name, spread(values)) for name, values in found.items()]
    rows += [
        ("state, bytes", str(account.state_bytes)), ("state, dense mixed precision", str(account.dense_state_bytes)),
        ("state, dense float32", str(16 * numbers)), ("gradients of a step, bytes", str(account.step_bytes)),
        ("gradients of a step, dense", str(account.dense_step_bytes)),
        *((f"state of ZeRO-1 on each of {n} devices", f"{size:.0f}") for n, size in zero.items()),
    ]  # fmt: skip
    finish(rows, {
        "memory_saving": 1 - account.state_bytes / account.dense_state_bytes,
        "memory_saving_against_float32": 1 - account.state_bytes / (16 * numbers),
        "gradient_bytes_saving": 1 - account.step_bytes / account.dense_step_bytes,
        "accuracy_gap_points": statistics.mean(found["accuracy gap in points, early-bird"]),
        "accuracy_gap_points_random_mask": statistics.mean(found["accuracy gap in points, random"]),
        "step_time_vs_dense": statistics.median(found["step time against dense"]),
        "zero1_bytes": zero, "state_bytes": account.state_bytes, "seeds": len(found["accuracy, dense"]),
    })  # fmt: skip


if __name__ == "__main__":
    main()
