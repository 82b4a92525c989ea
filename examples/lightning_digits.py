"""A LightningModule in a search, in both ways: as a candidate, and in an objective with a Trainer of its own.

python examples/lightning_digits.py
hydra-tune search examples/lightning_digits.py:build --trials 8 --metric val_acc --direction maximize
"""

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import hydra_tune as ht
from hydra_tune.lightning import HydraTuneCallback


class Digits(pl.LightningDataModule):
    def setup(self, stage):
        images, labels = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
        self.train, self.valid = random_split(data, [1400, 397], torch.Generator().manual_seed(0))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=64, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.valid, batch_size=256)


class Classifier(pl.LightningModule):
    def __init__(self, width, dropout, lr):
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 10))

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_loss", nn.functional.cross_entropy(logits, y))
        self.log("val_acc", (logits.argmax(1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)]


def module(trial):
    return Classifier(
        width=trial.suggest_int("width", 32, 512, log=True),
        dropout=trial.suggest_float("dropout", 0.0, 0.5),
        lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True),
    )


digits = Digits()


def build(trial):
    """The module as a candidate: any strategy trains it, also where it does not fit on a device."""
    return ht.Candidate.from_lightning(module(trial), digits, epochs=5)


def objective(trial):
    """The module with a Trainer of its own, which may do anything that Lightning can."""
    trainer = pl.Trainer(
        max_epochs=5, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        callbacks=[HydraTuneCallback(trial, monitor=["val_acc", "val_loss"])],
    )  # fmt: skip
    trainer.fit(module(trial), Digits())
    return trainer.callback_metrics["val_acc"].item()


if __name__ == "__main__":
    for way in (build, objective):
        result = ht.search(way, trials=8, metric="val_acc", direction="maximize", pruner="median")
        print(f"{way.__name__}: {result.best_value:.4f} with {result.best_params}")
