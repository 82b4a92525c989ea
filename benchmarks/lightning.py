"""What HydraTuneCallback costs a training step: the same Trainer with it and without.

One percent of a step is less than what a busy machine changes from one second to the next. So both are measured in one
fit: the callback is in the Trainer's list in every other epoch, and the median steps of the two kinds of epochs are
compared, in each of several fits. Two models, as the share depends on the step: the classifier of
examples/lightning_digits.py, whose step is mostly Lightning's own work, and one of some milliseconds.
One process of one thread; the callback reports to a study in memory, so that no database is measured.
"""

from __future__ import annotations

import logging
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import optuna
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.report import arguments, finish, spread
from hydra_tune.lightning import HydraTuneCallback


class Module(pl.LightningModule):
    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Clock:
    """Times each step from the end of the one before, and takes the callback out of every other epoch."""

    def __init__(self, module: Module, callback: Any) -> None:
        self.callback = callback
        self.with_it: list[float] = []
        self.without: list[float] = []
        self._last: float | None = None
        self._module = module
        module.on_train_epoch_start = self.epoch_starts  # type: ignore[method-assign]
        module.on_train_batch_end = self.batch_ends  # type: ignore[method-assign, assignment]

    def epoch_starts(self) -> None:
        trainer = self._module.trainer
        self._last = None
        self._kept = self.with_it if trainer.current_epoch % 2 else self.without
        others = [each for each in trainer.callbacks if each is not self.callback]  # type: ignore[attr-defined]
        trainer.callbacks[:] = [*others, self.callback] if trainer.current_epoch % 2 else others  # type: ignore[attr-defined]

    def batch_ends(self, *_args: Any) -> None:
        now = time.perf_counter()
        # The first two epochs are a warm-up, in which the callback also counts tensors.
        if self._last is not None and self._module.current_epoch > 1:
            self._kept.append(now - self._last)
        self._last = now


def small() -> tuple[nn.Module, TensorDataset]:
    layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10))
    return layers, TensorDataset(torch.randn(1400, 64), torch.randint(0, 10, (1400,)))


def medium() -> tuple[nn.Module, TensorDataset]:
    layers = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    return layers, TensorDataset(torch.randn(1400, 256), torch.randint(0, 10, (1400,)))


def measure(make: Callable[[], tuple[nn.Module, TensorDataset]], epochs: int) -> tuple[float, float]:
    """The median step without the callback and with it, in microseconds."""
    torch.manual_seed(0)
    layers, data = make()
    module = Module(layers)
    callback = HydraTuneCallback(optuna.create_study().ask(), "val_loss")
    clock = Clock(module, callback)
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=64), DataLoader(data, batch_size=700))
    return statistics.median(clock.without) * 1e6, statistics.median(clock.with_it) * 1e6


def main() -> None:
    options = arguments(__doc__ or "")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rounds = options.rounds or (3 if options.quick else 9)
    rows: list[tuple[str, str]] = []
    document: dict[str, Any] = {"rounds": rounds}
    for name, make, epochs in (("small", small, 60), ("medium", medium, 30)):
        measured = [measure(make, epochs // 2 if options.quick else epochs) for _ in range(rounds)]
        without, with_it = [a for a, _ in measured], [b for _, b in measured]
        added = [b - a for a, b in measured]
        share = [b / a - 1 for a, b in measured]
        rows += [
            (f"{name}: a step without, µs", spread(without)), (f"{name}: a step with, µs", spread(with_it)),
            (f"{name}: added, µs", spread(added)), (f"{name}: added, share", spread(share)),
        ]  # fmt: skip
        document[name] = {
            "step_us": statistics.median(without), "added_us": statistics.median(added),
            "overhead_per_step": statistics.median(share), "least": min(share), "most": max(share),
        }  # fmt: skip
    document["overhead_per_step"] = document["small"]["overhead_per_step"]
    finish(rows, document)


if __name__ == "__main__":
    main()
