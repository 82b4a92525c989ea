"""Candidates of one shape that train as one, slowly enough to be killed."""

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
    rows = torch.randn(100, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = TensorDataset(rows, (rows[:, 0] > 0).long())
    dropout = nn.Dropout(trial.suggest_float("dropout", 0.1, 0.6))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), Slow(), dropout, nn.Linear(16, 2))
    return ht.Candidate(
        model=model.double(),
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=trial.suggest_float("lr", 1e-2, 1e-1, log=True), momentum=0.9),
        train=data,
        valid=data,
        batch_size=10,
        epochs=8,
    )
