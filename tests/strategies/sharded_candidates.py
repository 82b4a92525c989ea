"""Candidates that do not fit a device of 3 MiB, and train for a few seconds with dropout and batch-norm."""

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hydra_tune as ht


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Takes a moment for each batch in training, so that there is something to interrupt."""
    if outputs.requires_grad:
        Path(f"trains-{os.getpid()}").touch()
        time.sleep(0.03)
    return nn.functional.cross_entropy(outputs, targets)


def build(trial: Any) -> ht.Candidate:
    Path(f"builds-{os.getpid()}").touch()
    rows = torch.randn(200, 256, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(rows, (rows[:, 0] > 0).long())
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(inplace=True), nn.Dropout(0.2)]
    return ht.Candidate(
        model=nn.Sequential(*layers, nn.Linear(256, 2)), loss=loss,
        optimizer=partial(torch.optim.AdamW, lr=trial.suggest_float("lr", 1e-4, 1e-2, log=True)),
        train=data, valid=data, batch_size=10, epochs=3, accumulate=3, keep="best",
    )  # fmt: skip
