"""Build functions and plain loops that several tests share."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hydra_tune as ht


def rows(count: int = 103, width: int = 6, classes: int = 3, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(count, width, generator=generator, dtype=dtype)
    targets = (inputs[:, 0] * 2 + inputs[:, 1] > 0).long() + (inputs[:, 2] > 0.5).long()
    return TensorDataset(inputs, targets % classes)


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return (outputs.argmax(1) == targets).double().mean().item()


def small_candidate(lr: float = 0.05, epochs: int = 2, **fields: Any) -> ht.Candidate:
    """A model with dropout and batch-norm in float64, whose last batch is smaller."""
    model = nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
    ).double()  # fmt: skip
    given: dict[str, Any] = {
        "model": model, "loss": nn.functional.cross_entropy, "optimizer": partial(torch.optim.AdamW, lr=lr),
        "train": rows(), "valid": rows(40), "batch_size": 10, "epochs": epochs, "metrics": {"accuracy": accuracy},
    }  # fmt: skip
    return ht.Candidate(**(given | fields))


def build_small(trial: Any) -> ht.Candidate:
    return small_candidate(lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True))


def plain_loop(candidate: ht.Candidate, seed: int, device: str = "cpu") -> tuple[nn.Module, list[float]]:
    """Plain PyTorch: what every exact strategy must equal. The candidate was built after manual_seed(seed)."""
    torch.manual_seed(seed)
    model, data, losses = candidate.model.to(device), candidate.train, []
    optimizer = candidate.optimizer(list(model.parameters()))
    schedule = candidate.scheduler(optimizer) if candidate.scheduler else None
    for epoch in range(candidate.epochs):
        model.train()
        batches = ht.epoch_order(len(data), seed, epoch).split(candidate.batch_size)
        for i, batch in enumerate(batches, start=1):
            inputs, targets = (tensor.to(device) for tensor in data[batch])
            loss = candidate.loss(model(inputs), targets)
            losses.append(loss.item())
            (loss / candidate.accumulate).backward()
            if i % candidate.accumulate == 0 or i == len(batches):
                if candidate.clip_grad_norm:
                    nn.utils.clip_grad_norm_(model.parameters(), candidate.clip_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
                if schedule and candidate.schedule_every == "step":
                    schedule.step()
        if schedule and candidate.schedule_every == "epoch":
            schedule.step()
    return model, losses
