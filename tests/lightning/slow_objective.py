"""A Lightning objective that trains for some seconds, with dropout and shuffled batches: a wrong resume would show."""

import time
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hydra_tune.lightning import HydraTuneCallback


class Net(pl.LightningModule):
    def __init__(self, width: int, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.4), nn.Linear(width, 2))
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.02)
        x, y = batch
        loss = nn.functional.cross_entropy(self.layers(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.layers(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


def objective(trial: Any) -> float:
    rows = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(rows, (rows[:, 0] > 0).long())
    module = Net(trial.suggest_int("width", 8, 64), trial.suggest_float("lr", 1e-3, 1e-1, log=True))
    trainer = pl.Trainer(
        max_epochs=8, accelerator="cpu", logger=False, callbacks=[HydraTuneCallback(trial, monitor="val_loss")],
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=10, shuffle=True), DataLoader(data, batch_size=50))
    return trainer.callback_metrics["val_loss"].item()
