"""Candidates that need several devices of a megabyte in dense training, and fewer when they are pruned."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hydra_tune as ht


def rows(count: int, dtype: torch.dtype) -> TensorDataset:
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(7), dtype=dtype)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 2] > 0.5).long())


def deep(dtype: torch.dtype = torch.float32, **fields: Any) -> ht.Candidate:
    """Eight layers of 65,536 weights: 128 KiB each in 16 bits, and a megabyte with Adam in float32."""
    layers: list[nn.Module] = [nn.Linear(6, 256)]
    for _ in range(8):
        layers += [nn.Tanh(), nn.Linear(256, 256)]
    given: dict[str, Any] = {
        "model": nn.Sequential(*layers, nn.Linear(256, 3)).to(dtype), "loss": F.cross_entropy,
        "optimizer": partial(torch.optim.AdamW, lr=0.003), "train": rows(40, dtype), "valid": rows(16, dtype),
        "batch_size": 8, "epochs": 3, "keep": "best",
    }  # fmt: skip
    return ht.Candidate(**(given | fields))


def build(trial: Any) -> ht.Candidate:
    return deep(sparsity=trial.suggest_float("sparsity", 0.9, 0.95))
