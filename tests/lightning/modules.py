"""Small LightningModules under either name of Lightning, for the tests."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from tests.candidates import rows

BOTH = ["pytorch_lightning", "lightning.pytorch"]


def net(lightning: Any, *, lr: float = 0.05, dropout: float = 0.0, double: bool = False) -> Any:
    """The usual module of a tutorial: forward, a loss, some logs, one optimizer with a schedule."""

    class Net(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(self(x), y)
            self.log("train_loss", loss, on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            logits = self(x)
            self.log("val_loss", nn.functional.cross_entropy(logits, y))
            self.log("val_acc", (logits.argmax(1) == y).float().mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=lr)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    made = Net()
    return made.double() if double else made


def loaders(
    *, dtype: torch.dtype = torch.float32, seed: int | None = None, workers: int = 0, sampled: bool = False
) -> tuple[Any, Any]:
    """Training rows in random order, validation rows; with a generator of their own where there is a seed.

    With `sampled` the sampler has it, and not the loader.
    """

    def generator() -> torch.Generator | None:
        return None if seed is None else torch.Generator().manual_seed(seed)

    data = rows(103, dtype=dtype)
    order = {"sampler": RandomSampler(data, generator=generator())} if sampled else {"shuffle": True}
    train = DataLoader(
        data, batch_size=10, generator=None if sampled else generator(), num_workers=workers, **order
    )  # fmt: skip
    return train, DataLoader(rows(40, dtype=dtype), batch_size=10, generator=generator())


def trainer(lightning: Any, **options: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False}
    return lightning.Trainer(**{"max_epochs": 3, "accelerator": "cpu", "devices": 1, **quiet, **options})


def lightning(name: str) -> Any:
    return importlib.import_module(name)
