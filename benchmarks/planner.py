"""Twelve mixed candidates on two CPU devices: accuracy of predicted time and memory, and the gain from choosing.

Small MLPs, a residual net, and five GPTs, of which two fit a device whole and three do not. `auto` chooses for each
trial; `shard` and `pipeline`, one trial at a time as both devices hardly hold the largest, are the fixed strategies
that can train all twelve (`whole` cannot: some do not fit). `model parallel` trains one trial at a time on one device
at a time, with the memory of both and free transfers, which favours it. Then six small trials and a long one run on the
same two devices; the long one is alone for most of its time, unless it is spread over both. A makespan is from the
first unit of a search to its last, including builds and surveys. The costs of models are measured once and kept; `cold`
is the search that measures them. Much slower systems run in fewer rounds.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hydra_tune as ht
from benchmarks.report import arguments, finish, interleaved, ratios, spread

BUDGET = 64 * 2**20
VOCABULARY, STEPS = 64, 64
MLPS, NETS, GPTS = 6, 1, 5
BESIDE = 2
"""Rounds of the much slower systems."""
LONG = 7
"""Trials of the second search, one of which is long."""
TRIALS = MLPS + NETS + GPTS


class Block(nn.Module):
    """A transformer block of the usual kind, without dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, steps, width = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(rows, steps, 3, 8, width // 8).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, steps, width))
        return x + self.mlp(self.norms[1](x))


class Last(nn.Module):
    """Predicts the next token from the last step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x[:, -1])


def gpt(width: int, depth: int) -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, width), *(Block(width) for _ in range(depth)), Last(width))


class Residual(nn.Module):
    """A block of a residual net."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inside = torch.relu(self.norms[0](self.convolutions[0](x)))
        return torch.relu(x + self.norms[1](self.convolutions[1](inside)))


def resnet() -> nn.Module:
    stem = [nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(
        *stem, *(Residual(32) for _ in range(3)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    )


def rows(count: int, *shape: int, classes: int = 10) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    return TensorDataset(
        torch.randn(count, *shape, generator=generator), torch.randint(0, classes, (count,), generator=generator)
    )


def text(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randint(0, VOCABULARY, (count, STEPS + 1), generator=generator)
    return TensorDataset(tokens[:, :-1], tokens[:, -1])


def candidate(model: nn.Module, train: TensorDataset, batch_size: int, epochs: int) -> ht.Candidate:
    return ht.Candidate(
        model=model, loss=nn.functional.cross_entropy, optimizer=functools.partial(torch.optim.Adam, lr=1e-3),
        train=train, batch_size=batch_size, epochs=epochs,
    )  # fmt: skip


def build(trial: Any) -> ht.Candidate:
    """Build candidate number `which`: some of each kind, the long ones neither first nor last."""
    which = trial.suggest_int("which", 0, TRIALS - 1)
    if which in (2, 7):
        return candidate(gpt(256, 4), text(16 * 24), 16, 1)
    if which == 9:
        return candidate(gpt(128, 4), text(32 * 24), 32, 1)
    if which in (4, 6):
        return candidate(gpt(128, 4), text(12 * 64), 12, 1)
    if which == 5:
        return candidate(resnet(), rows(64 * 30, 8, 8), 64, 1)
    return small(256 + 32 * which)


def small(width: int) -> ht.Candidate:
    layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    return candidate(nn.Sequential(*layers), rows(64 * 150, 64), 64, 2)


def build_long(trial: Any) -> ht.Candidate:
    """Build small candidates, and last a long one with large layers."""
    if trial.suggest_int("which", 0, LONG - 1) < LONG - 1:
        return small(256)
    layers = [layer for _ in range(8) for layer in (nn.Linear(768, 768), nn.ReLU())]
    return candidate(nn.Sequential(*layers, nn.Linear(768, 10)), rows(2048 * 12, 768), 2048, 3)


class Run:
    """A search and its records."""

    def __init__(self, folder: str, make: Callable[[Any], ht.Candidate], trials: int, **options: Any) -> None:
        from hydra_tune.storage import open_storage
        from hydra_tune.storage.queries import trial_units

        url = f"sqlite:///{folder}/planner.db"
        result = ht.search(
            make, trials=trials, devices="2xcpu", sampler="random", seed=1, storage=url, progress=False,
            checkpoint_seconds=3600, study=f"run-{time.time_ns()}", enqueue=[{"which": i} for i in range(trials)],
            **options,
        )  # fmt: skip
        assert result.completed == trials, [(t.number, t.state, t.error) for t in result.trials]
        self.trials = result.trials
        with open_storage(url, read_only=True) as storage:
            units = trial_units(storage, result.study.study_name)
        result.close()
        self.seconds = max(u.started + u.seconds for u in units) - min(u.started for u in units)

    def choices(self) -> Iterable[dict[str, Any]]:
        for trial in self.trials:
            yield (trial.plan or {})["choice"]


AUTO: list[Run] = []
MOVED: list[bool] = []


def auto(folder: str) -> float:
    AUTO.append(Run(folder, build, TRIALS, device_memory=BUDGET, strategy="auto"))
    return AUTO[-1].seconds


def auto_long(folder: str) -> float:
    run = Run(folder, build_long, LONG, strategy="auto")
    MOVED.append(any(choice["strategy"] == "pipeline" for choice in run.choices()))
    return run.seconds


def fixed(folder: str, make: Callable[[Any], ht.Candidate], trials: int, strategy: Any, **options: Any) -> float:
    return Run(folder, make, trials, strategy=strategy, **options).seconds


def main() -> None:
    options = arguments(__doc__ or "")
    rounds = options.rounds or (1 if options.quick else 5)
    mixed = {"device_memory": BUDGET}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        cold = auto(folder)  # its measurements of models are kept for the others
        AUTO.clear()
        contest = {
            "auto": lambda: auto(folder),
            "shard": lambda: fixed(folder, build, TRIALS, "shard", **mixed),
        }  # fmt: skip
        slower = {
            "auto": contest["auto"],
            "pipeline": lambda: fixed(folder, build, TRIALS, "pipeline", concurrency=1, **mixed),
            "model parallel": lambda: fixed(folder, build, TRIALS, "shard", concurrency=1, device_memory=2 * BUDGET),
        }
        seconds, beside = interleaved(contest, rounds), interleaved(slower, min(rounds, BESIDE))
        contest = {
            "auto": lambda: auto_long(folder),
            "whole": lambda: fixed(folder, build_long, LONG, "whole"),
            "shard": lambda: fixed(folder, build_long, LONG, "shard"),
            "pipeline": lambda: fixed(folder, build_long, LONG, "pipeline"),
        }
        tail = interleaved(contest, rounds)
    _report(cold, seconds, beside, tail)


def _errors(name: str, predicted: str) -> list[float]:
    """Return |measured / predicted - 1| of each trial that was long enough to be measured."""
    found = []
    for run in AUTO:
        for choice in run.choices():
            if choice.get(name) and choice.get(predicted):
                found.append(abs(choice[name] / choice[predicted] - 1))
    return found


def _report(
    cold: float, seconds: dict[str, list[float]], beside: dict[str, list[float]], tail: dict[str, list[float]]
) -> None:
    time_errors = _errors("measured_batch_ms", "predicted_batch_ms")
    memory_errors = _errors("measured_device_bytes", "predicted_device_bytes")
    # The best of the fixed strategies that can train all twelve.
    pipeline = statistics.median(beside["pipeline"])
    fixed_best = [min(shard, pipeline) for shard in seconds["shard"]]
    tail_best = [min(three) for three in zip(tail["whole"], tail["shard"], tail["pipeline"], strict=True)]
    figures = {
        "vs_best_fixed": ratios(fixed_best, seconds["auto"]),
        "vs_worst_fixed": ratios(beside["pipeline"], beside["auto"]),
        "vs_model_parallel": ratios(beside["model parallel"], beside["auto"]),
        "vs_best_fixed_last_survivor": ratios(tail_best, tail["auto"]),
        "last_survivor_vs_whole": ratios(tail["whole"], tail["auto"]),
        "last_survivor_vs_pipeline": ratios(tail["pipeline"], tail["auto"]),
    }
    chosen = sorted({choice["strategy"] for run in AUTO for choice in run.choices()})
    document = {name: statistics.median(values) for name, values in figures.items()} | {
        "median_prediction_error": statistics.median(time_errors),
        "memory_prediction_error": statistics.median(memory_errors),
        "largest_memory_error": max(memory_errors), "predictions": len(time_errors), "cold_seconds": cold,
        "chosen": chosen, "moved_in_training": sum(MOVED),
        "rounds": len(seconds["auto"]),
    }  # fmt: skip
    rows_ = [(name, spread(values)) for name, values in figures.items()]
    trials = sum(len(run.trials) for run in AUTO)
    rows_ += [(f"prediction error of a batch's time, {len(time_errors)} of {trials} trials", spread(time_errors))]
    rows_ += [("prediction error of a device's memory", spread(memory_errors))]
    rows_ += [("seconds, auto, cold", f"{cold:.3f}")]
    rows_ += [(f"seconds, {name}", spread(values)) for name, values in {**beside, **seconds}.items()]
    rows_ += [(f"seconds, with one long trial, {name}", spread(values)) for name, values in tail.items()]
    finish([*rows_, ("strategies that auto chose", ", ".join(chosen))], document)


if __name__ == "__main__":
    main()
