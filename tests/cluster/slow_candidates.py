"""Candidates whose training takes long enough for something to happen to their node."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

import hydra_tune as ht
from tests.candidates import rows, small_candidate

BATCH_SECONDS = 0.02


class Slow(nn.Module):
    """A pause in each training batch, which changes no number."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(BATCH_SECONDS)
        return inputs


def build_slow(trial: Any) -> ht.Candidate:
    lr = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
    candidate = small_candidate(lr=lr, train=rows(60), valid=rows(40), epochs=10)
    candidate.model.append(Slow())
    return candidate


def build_large(trial: Any) -> ht.Candidate:
    """The second trial is larger than a device of 40 MiB."""
    wide = 1_500 if trial.number == 1 else 8
    model = nn.Sequential(nn.Linear(6, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, 3)).double()
    return small_candidate(lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True), model=model, epochs=1)
