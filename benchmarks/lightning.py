"""Cost of HydraTuneCallback per training step: the same Trainer with and without it.

One percent of a step is less than a machine's fluctuation between moments. So all is measured in one fit: steps
alternate between no callback, an empty one and HydraTuneCallback, and the cost of each is the median difference to a
neighbouring step without one, in each of several fits. The empty callback shows Lightning's own cost of calling hooks.
There are two models, as the share depends on the step: the classifier of examples/lightning_digits.py, whose step is
mostly Lightning's own work, and one with a step of some milliseconds. One process of one thread; the reports go to a
study in memory, so that no database is measured.
"""

from __future__ import annotations

import logging
import random
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


class Empty(pl.Callback):
    """A callback that does nothing."""


class Clock:
    """Times each step from the end of the previous one, and alternates the callbacks step by step."""

    def __init__(self, module: Module, turns: dict[str, Any]) -> None:
        self.turns = turns
        self.rounds: list[dict[str, float]] = []
        self._round: dict[str, float] = {}
        self._left: list[str] = []
        self._last: float | None = None
        self._module = module
        module.on_train_epoch_start = self.epoch_starts  # type: ignore[method-assign]
        module.on_train_batch_end = self.batch_ends  # type: ignore[method-assign, assignment]

    def epoch_starts(self) -> None:
        self._last, self._left = None, []
        self._next()

    def _next(self) -> None:
        """Start the next turn; each round has its own order of the three."""
        if not self._left:
            if len(self._round) == len(self.turns):
                self.rounds.append(self._round)
            self._round = {}
            self._left = random.sample(list(self.turns), len(self.turns))
        self._turn = self._left.pop()
        trainer: Any = self._module.trainer
        others = [each for each in trainer.callbacks if each not in self.turns.values()]
        mine = self.turns[self._turn]
        trainer.callbacks[:] = others if mine is None else [*others, mine]

    def batch_ends(self, *_args: Any) -> None:
        now = time.perf_counter()
        # The first epochs are a warm-up, in which the callback also counts tensors.
        if self._last is not None and self._module.current_epoch > 1:
            self._round[self._turn] = (now - self._last) * 1e6
        self._next()
        self._last = time.perf_counter()

    def added(self, name: str) -> float:
        return statistics.median(each[name] - each["none"] for each in self.rounds)


def small() -> tuple[nn.Module, TensorDataset]:
    layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10))
    return layers, TensorDataset(torch.randn(1400, 64), torch.randint(0, 10, (1400,)))


def medium() -> tuple[nn.Module, TensorDataset]:
    layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return layers, TensorDataset(torch.randn(1400, 256), torch.randint(0, 10, (1400,)))


def measure(make: Callable[[], tuple[nn.Module, TensorDataset]], epochs: int) -> tuple[float, float, float]:
    """Return the median step without a callback, and the extra time of an empty one and ours, in microseconds."""
    torch.manual_seed(0)
    layers, data = make()
    module = Module(layers)
    ours = HydraTuneCallback(optuna.create_study().ask(), "val_loss")
    clock = Clock(module, {"none": None, "empty": Empty(), "ours": ours})
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[ours],
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=64), DataLoader(data, batch_size=700))
    return statistics.median(each["none"] for each in clock.rounds), clock.added("empty"), clock.added("ours")


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
    for name, make in (("small", small), ("medium", medium)):
        measured = [measure(make, 24 if options.quick else 60) for _ in range(rounds)]
        steps = [step for step, _, _ in measured]
        of_any, of_ours = ([each[kind] / each[0] for each in measured] for kind in (1, 2))
        rows += [
            (f"{name}: a step without a callback, µs", spread(steps)),
            (f"{name}: added by an empty callback, µs", spread([empty for _, empty, _ in measured])),
            (f"{name}: added by HydraTuneCallback, µs", spread([ours for _, _, ours in measured])),
            (f"{name}: added by an empty callback, share", spread(of_any)),
            (f"{name}: added by HydraTuneCallback, share", spread(of_ours)),
        ]
        document[name] = {
            "step_us": statistics.median(steps), "overhead_per_step": statistics.median(of_ours),
            "least": min(of_ours), "most": max(of_ours), "empty_callback": statistics.median(of_any),
        }  # fmt: skip
    document["overhead_per_step"] = document["medium"]["overhead_per_step"]
    finish(rows, document)


if __name__ == "__main__":
    main()
