"""Sixty-four small trials of one shape: as packs, one by one, and by plain loops of others.

An MLP, a small convolutional net and a small transformer on digits, and an MLP on a table of 4,000 rows; rates, decay
and dropout differ from trial to trial. `auto` chooses packs by itself where its rehearsal finds them quicker. The time
runs from the start of the first trial to the end of the last, with builds, surveys and the database. `never_slower` is
`auto` against `whole` on models too wide to gain. The plain Optuna loop trains in this process, without a database, a
checkpoint or reports; Ray Tune, if it is installed, starts a process for each trial. The `training` gains are CPU time
of training and evaluation alone, in this process, of 32 members against the plain loop.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import hydra_tune as ht
from benchmarks.report import arguments, finish, interleaved, ratios, spread
from hydra_tune.strategies.pack.member import Member
from hydra_tune.strategies.pack.pack import Pack
from hydra_tune.training.loop import Training

TRIALS = 64
WIDE_TRIALS = 12


class Convolutions(nn.Module):
    """Two convolutions with batch-norm over images of 8 by 8."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.BatchNorm2d(2 * channels), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * channels, 10),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x.view(-1, 1, 8, 8))


class Transformer(nn.Module):
    """Two layers over the eight rows of an image."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=dropout, batch_first=True)
        self.embed, self.head = nn.Linear(8, width), nn.Linear(width, 10)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.layers(self.embed(x.view(-1, 8, 8))).mean(1))


@cache
def digits() -> tuple[TensorDataset, TensorDataset]:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    return TensorDataset(x[:1400], y[:1400]), TensorDataset(x[1400:], y[1400:])


@cache
def table() -> tuple[TensorDataset, TensorDataset]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 20, generator=draw)
    y = (torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.3 * torch.randn(4000, generator=draw) > 0).long()
    return TensorDataset(x[:3200], y[:3200]), TensorDataset(x[3200:], y[3200:])


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.argmax(1) == targets).float().mean()


def dense(inputs: int, width: int, outputs: int, dropout: float, depth: int = 1) -> nn.Module:
    layers: list[nn.Module] = []
    for size in [inputs, *[width] * (depth - 1)]:
        layers += [nn.Linear(size, width), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


MODELS: dict[str, Callable[[float], nn.Module]] = {
    "mlp": lambda dropout: dense(64, 32, 10, 0.0),
    "conv": lambda dropout: Convolutions(),
    "transformer": lambda dropout: Transformer(16, dropout),
    "table": lambda dropout: dense(20, 64, 2, dropout, depth=2),
    "wide": lambda dropout: dense(64, 1024, 10, 0.0, depth=2),
}
EPOCHS = {"mlp": 10, "conv": 5, "transformer": 3, "table": 8, "wide": 4}


def build(kind: str, trial: Any) -> ht.Candidate:
    rate = trial.suggest_float("lr", 1e-4, 1e-2, log=True)
    decay = trial.suggest_float("weight_decay", 1e-6, 1e-1, log=True)
    train, valid = table() if kind == "table" else digits()
    return ht.Candidate(
        model=MODELS[kind](trial.suggest_float("dropout", 0.0, 0.5)), loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=rate, weight_decay=decay), train=train, valid=valid, batch_size=64,
        epochs=EPOCHS[kind], metrics={"accuracy": accuracy},
    )  # fmt: skip


def search(kind: str, strategy: str, devices: int, trials: int) -> float:
    """Return trials per minute."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        result = ht.search(
            partial(build, kind), trials=trials, strategy=strategy, devices=f"{devices}xcpu", sampler="random", seed=1,
            storage=f"sqlite:///{folder}/pack.db", progress=False, metric="accuracy", direction="maximize",
        )  # fmt: skip
        ran = result.study.trials
        seconds = max(t.datetime_complete for t in ran) - min(t.datetime_start for t in ran)
        assert all(t.value is not None for t in ran)
        result.close()
    return 60 * trials / seconds.total_seconds()


def training_gain(kind: str, members: int, epochs: int = 2) -> float:
    """Return how many times less CPU time an epoch takes a member of a pack than a plain loop, in this process."""
    torch.set_num_threads(1)
    made = [optuna.trial.FixedTrial({"lr": 1e-3, "weight_decay": 0.01, "dropout": 0.2}) for _ in range(members)]
    candidates = [build(kind, each) for each in made]
    cpu = torch.device("cpu")
    plain = [Training(each, each.train, each.valid, seed, cpu) for seed, each in enumerate(candidates[:2])]
    packed = [Member(each, each.train, each.valid, seed, cpu) for seed, each in enumerate(candidates[2:])]
    pack = Pack(packed)
    for each in (*plain, pack):  # the first epoch makes optimizer states, and is compared
        each.train_for(1e6)
        each.end_epoch()
    seconds = [0.0, 0.0]
    for _ in range(epochs):
        began = time.process_time()
        for training in plain:
            training.train_for(1e6)
            training.end_epoch()
        between = time.process_time()
        pack.train_for(1e6)
        pack.end_epoch()
        seconds[0] += (between - began) / len(plain)
        seconds[1] += (time.process_time() - between) / len(packed)
    return seconds[0] / seconds[1]


def train_plainly(candidate: ht.Candidate) -> float:
    """Train and evaluate by a loop as in a tutorial; return the accuracy."""
    model, data = candidate.model, candidate.train
    optimizer = candidate.optimizer(list(model.parameters()))
    for _ in range(candidate.epochs):
        model.train()
        for rows in torch.randperm(len(data)).split(candidate.batch_size):
            inputs, targets = data[rows]
            optimizer.zero_grad()
            loss = candidate.loss(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        model.eval()
        with torch.no_grad():
            found = float(accuracy(model(candidate.valid.tensors[0]), candidate.valid.tensors[1]))
    return found


def optuna_loop(kind: str, trials: int) -> float:
    """Return trials per minute of a plain Optuna study in memory, on one core."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(1)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(1))
    began = time.perf_counter()
    study.optimize(lambda trial: train_plainly(build(kind, trial)), n_trials=trials)
    return 60 * trials / (time.perf_counter() - began)


def ray_trial(kind: str, config: dict[str, float]) -> None:
    from ray import tune

    torch.set_num_threads(1)
    tune.report({"accuracy": train_plainly(build(kind, optuna.trial.FixedTrial(config)))})


def ray_tune(kind: str, trials: int) -> float:
    """Return trials per minute of Ray Tune with two trials at a time."""
    import ray
    from ray import tune

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
    space = {
        "lr": tune.loguniform(1e-4, 1e-2), "weight_decay": tune.loguniform(1e-6, 1e-1),
        "dropout": tune.uniform(0.0, 0.5),
    }  # fmt: skip
    tuner = tune.Tuner(
        partial(ray_trial, kind), param_space=space, run_config=tune.RunConfig(verbose=0),
        tune_config=tune.TuneConfig(num_samples=trials, metric="accuracy", mode="max"),
    )  # fmt: skip
    began = time.perf_counter()
    tuner.fit()
    seconds = time.perf_counter() - began
    ray.shutdown()
    return 60 * trials / seconds


def main() -> None:
    given = arguments(__doc__ or "")
    inside = {
        f"{kind}_training_gain": [training_gain(kind, 34 if not given.quick else 10) for _ in range(given.rounds or 2)]
        for kind in ("mlp", "conv", "transformer", "table", "wide")
    }
    trials, rounds = (8, 1) if given.quick else (TRIALS, given.rounds or 2)
    systems: dict[str, Callable[[], float]] = {}
    for kind in ("mlp", "conv", "transformer", "table"):
        for devices in (1, 2):
            systems[f"{kind} whole {devices}"] = partial(search, kind, "whole", devices, trials)
            systems[f"{kind} auto {devices}"] = partial(search, kind, "auto", devices, trials)
    wide = 4 if given.quick else WIDE_TRIALS
    systems["wide whole"] = partial(search, "wide", "whole", 1, wide)
    systems["wide auto"] = partial(search, "wide", "auto", 1, wide)
    systems["mlp optuna"] = partial(optuna_loop, "mlp", trials)
    measured = interleaved(systems, rounds)
    if importlib.util.find_spec("ray") is not None and not given.quick:
        measured["mlp ray tune"] = [ray_tune("mlp", trials)]
    gains = {
        f"{kind}_speedup{'' if devices == 1 else '_on_two'}": ratios(
            measured[f"{kind} auto {devices}"], measured[f"{kind} whole {devices}"]
        )
        for kind in ("mlp", "conv", "transformer", "table")
        for devices in (1, 2)
    }
    gains["never_slower"] = ratios(measured["wide auto"], measured["wide whole"])
    gains |= inside
    rows = [(f"{name}, trials per minute", spread(values)) for name, values in measured.items()]
    rows += [(name, spread(values)) for name, values in gains.items()]
    per_minute = {name.replace(" ", "_"): statistics.median(values) for name, values in measured.items()}
    finish(rows, {**{name: statistics.median(values) for name, values in gains.items()}, **per_minute})


if __name__ == "__main__":
    main()
