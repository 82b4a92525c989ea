"""Candidates that train for a second or two, with dropout, so that a mistake in resuming shows in the result."""

import time
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hydra_tune as ht


class Slow(nn.Module):
    """A moment for each batch, so that there is something to interrupt."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(0.02)
        return x


def build(trial: Any) -> ht.Candidate:
    rows = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(rows, (rows[:, 0] > 0).long())
    width = trial.suggest_int("width", 8, 64)
    lr = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
    return ht.Candidate(
        model=nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), Slow(), nn.Dropout(0.4), nn.Linear(width, 2)),
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=lr),
        train=data,
        valid=data,
        batch_size=10,
        epochs=8,
    )
