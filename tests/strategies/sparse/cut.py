"""Pruned trials in stages and in shards, in this process, and the training that each must equal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import hydra_tune as ht
from hydra_tune.engine.unit import UnitResult
from hydra_tune.spill.device_memory import DeviceMemory
from hydra_tune.strategies.sparse.strategy import Sparse
from hydra_tune.strategies.sparse.training import SparseTraining
from hydra_tune.training.prepared import Prepared
from tests.candidates import rows
from tests.strategies.pipeline.here import BUILDER, ROOM, Here
from tests.strategies.shard.models import CPU, SEED

WIDTH = 32


class Positions(nn.Module):
    """A small transformer: embeddings that are a plain parameter, norms, attention, a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(1, WIDTH)
        self.positions = nn.Parameter(torch.randn(6, WIDTH) * 0.1)
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.TransformerEncoderLayer(WIDTH, 2, 64, dropout=0.0, batch_first=True)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x.unsqueeze(-1)) + self.positions
        h = self.attention(self.norm(h))
        h = self.twice(torch.tanh(self.twice(h)))
        return self.head(h.mean(1))


def mlp() -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(6, WIDTH)]
    for _ in range(4):
        layers += [nn.LayerNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 3))


class Shared(nn.Module):
    """A layer that is used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.ends, self.head = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.middle = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.ends(self.stem(x)))
        for layer in self.middle:
            h = torch.tanh(layer(h))
        return self.head(self.ends(h))


def wide() -> nn.Module:
    """Eight layers of 128 KiB in 16 bits."""
    layers: list[nn.Module] = [nn.Linear(6, 256)]
    for _ in range(8):
        layers += [nn.Tanh(), nn.Linear(256, 256)]
    return nn.Sequential(*layers, nn.Linear(256, 3))


MODELS: dict[str, Any] = {"mlp": mlp, "positions": Positions, "shared": Shared, "wide": wide}


def candidate(kind: str = "mlp", dtype: torch.dtype = torch.float64, **fields: Any) -> ht.Candidate:
    """The same each time: its weights come from one seed."""
    torch.manual_seed(1)
    given: dict[str, Any] = {
        "model": MODELS[kind]().to(dtype), "loss": F.cross_entropy,
        "optimizer": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1), "train": rows(37, dtype=dtype),
        "valid": rows(11, dtype=dtype), "batch_size": 8, "epochs": 3,
    }  # fmt: skip
    return ht.Candidate(**(given | fields))


def plain(made: ht.Candidate, strategy: Sparse, folder: Path) -> SparseTraining:
    """The training of one replica on one device, to the last epoch."""
    pruning = strategy.pruning(Here(made, folder, 1))
    training = SparseTraining(Prepared(made, made.train, made.valid), SEED, CPU, pruning, 0, 1)
    best: float | None = None
    while training.epoch < made.epochs:
        training.look_for_mask()
        training.train_batches(10**6)
        judged = training.end_epoch()
        if made.keep == "best" and (best is None or judged["loss"] < best):
            best = judged["loss"]
            training.keep_weights()
    return training


class Cut(Here):
    """A pruned trial that is taken apart; it can be told to write checkpoints, and to stop after some epochs."""

    every_time = False
    most = 10**6
    behind = 0
    """Epochs that were over when it was taken up."""
    watch: Callable[[Cut, str], None] | None = None
    """Called after each unit."""

    async def unit(self, kind: str, *args: Any, **options: Any) -> UnitResult:
        result = await super().unit(kind, *args, **options)
        if self.watch is not None:
            self.watch(self, kind)
        return result

    def checkpoint_due(self, *, waits: bool = False) -> bool:
        return self.every_time

    async def report(self, epoch: int, metrics: dict[str, float]) -> None:
        if epoch + 1 >= self.most:
            raise Stopped

    async def restored(self, history: list[dict[str, float]], notes: tuple[str, ...]) -> None:
        self.behind = len(history)

    def parts(self) -> list[Any]:
        """Return each device's part."""
        return [context.resident["a"] for context in self.contexts[1:] if "a" in context.resident]

    def close(self) -> None:
        for context in self.contexts:
            memory: DeviceMemory | None = context.blocks
            for held in context.resident.values():
                if context is not self.contexts[BUILDER]:
                    held.close()
            if memory is not None:
                memory.close()
        held = self.contexts[BUILDER].resident.get("a")
        if hasattr(held, "close"):
            held.close()


class Stopped(Exception):
    """Raised to stop the trial here, so that it can resume elsewhere."""


@contextmanager
def cut(
    made: ht.Candidate, strategy: Sparse, folder: Path, devices: int = 2, room: int = ROOM, **told: Any
) -> Iterator[Cut]:
    """Train a candidate in stages or shards, to the last epoch or to where it is told to stop."""
    run = Cut(made, folder, devices, room)
    for name, value in told.items():
        setattr(run, name, value)
    try:
        with suppress(Stopped):
            asyncio.run(strategy.train(run))
        yield run
    finally:
        run.close()
