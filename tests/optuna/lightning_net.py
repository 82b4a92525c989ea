"""A LightningModule that processes started by `ddp_spawn` can import by its name."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch


class Net(pl.LightningModule):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layer, self.rate = torch.nn.Linear(4, 2), rate

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("acc", (self.layer(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)
