"""Objectives that train with two processes on the CPU; each rank leaves a file that says how it ended."""

import math
import os
from typing import Any

import optuna
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hydra_tune.lightning import HydraTuneCallback


class Net(pl.LightningModule):
    def __init__(self, lr: float, last: float = 1.0) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.lr, self.last = lr, last

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        self.log("val_loss", loss * self.last if self.current_epoch == 1 else loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Seen(pl.Callback):
    """What each rank has done, in a file of its own: with which parameters, and how often it was validated."""

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            with open(f"rank-{trainer.global_rank}-of-{trainer.world_size}.txt", "a") as file:
                file.write(f"lr={pl_module.lr!r} epoch={trainer.current_epoch}\n")


def fit(trial: Any, strategy: str, monitor: str = "val_loss", last: float = 1.0, epochs: int = 3) -> float:
    rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(rows, (rows[:, 0] > 0).long())
    callback = HydraTuneCallback(trial, monitor=monitor)
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, callbacks=[Seen(), callback],
    )  # fmt: skip
    module = Net(trial.suggest_float("lr", 0.01, 0.1), last)
    trainer.fit(module, DataLoader(data, batch_size=8), DataLoader(data, batch_size=8))
    callback.check_pruned()  # as objectives for Optuna's callback do; nothing is left to check
    assert trainer.callback_metrics["val_loss"].item() > 0
    return trainer.callback_metrics["val_loss"].item()


def spawn(trial: Any) -> float:
    """The third trial diverges, the fourth asks for what is not there."""
    last = math.nan if trial.number == 2 else 1.0
    return fit(trial, "ddp_spawn", "val_los" if trial.number == 3 else "val_loss", last)


def relaunching(trial: Any) -> float:
    return fit(trial, "ddp") if trial.number == 0 else trial.suggest_float("lr", 0.01, 0.1)


class Prune(optuna.pruners.BasePruner):
    """At the second report of trials with odd numbers."""

    def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
        return trial.number % 2 == 1 and trial.last_step == 1


if __name__ == "__main__":
    from hydra_tune.lightning import optimize_ddp

    def make_study() -> optuna.Study:
        with open("studies.txt", "a") as file:
            file.write(f"{os.environ.get('LOCAL_RANK')}\n")
        return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3), pruner=Prune())

    study = optimize_ddp(make_study, lambda trial: fit(trial, "ddp"), n_trials=3)
    if study is not None:
        print([(trial.state.name, len(trial.intermediate_values), trial.params["lr"]) for trial in study.trials])
