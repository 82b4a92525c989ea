"""Independent subnets against local SGD and data parallelism: bytes, accuracy at equal steps and FLOPs, memory.

Everything runs in this process, one thread, with the code that workers run: phases of subnets and the assembly of their
results (`strategies/subnets`). Local SGD is the same with nothing dealt out; data parallelism of n workers is one
worker with n times the batch, its bytes those of the gradients. The controls are a dense net as narrow as a subnet, and
the dense net trained for as many FLOPs as all subnets together took.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hydra_tune as ht
from benchmarks.report import arguments, finish
from hydra_tune.strategies.shard.optimizers import OptimizerParts
from hydra_tune.strategies.subnets.assembly import assembled
from hydra_tune.strategies.subnets.find import find_structure
from hydra_tune.strategies.subnets.judging import judged
from hydra_tune.strategies.subnets.phase import Phase, RoundsKit, State, start
from hydra_tune.strategies.subnets.structure import Structure
from hydra_tune.strategies.subnets.work import share_of
from hydra_tune.training.loop import Training

CPU = torch.device("cpu")
LOCAL_STEPS = 20
PASSES = 16
"""Passes over the digits per epoch: a round ends with its epoch, and 39 batches are too few for 20 on each of 8."""


@dataclass(frozen=True)
class Task:
    """A data set, a perceptron with batch-norm for it (as in the paper), and its training length."""

    name: str
    train: TensorDataset
    valid: TensorDataset
    widths: tuple[int, ...]
    """Widths of inputs, hidden layers and outputs."""
    batch: int
    rate: float
    steps: int
    """Steps of each worker, for any number of workers."""

    def candidate(self, widths: tuple[int, ...], batch: int) -> ht.Candidate:
        return ht.Candidate(
            model=perceptron(widths), loss=nn.functional.cross_entropy,
            optimizer=partial(torch.optim.SGD, lr=self.rate), train=self.train, valid=self.valid, batch_size=batch,
            epochs=1, metrics={"accuracy": accuracy}, drop_last=True,
        )  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """Result of one training."""

    accuracy: float
    bytes: int
    """Bytes communicated, counted from the tensors."""
    peak: int
    """Peak bytes of a worker."""


def perceptron(widths: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-2])


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return (outputs.argmax(1) == targets).double().mean().item()


def digits() -> Task:
    from sklearn.datasets import load_digits

    data = load_digits()
    inputs = torch.tensor(data.data / 16, dtype=torch.float32)
    targets = torch.tensor(data.target)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    test, train = order[:540], order[540:]
    return Task(
        "digits", TensorDataset(inputs[train].repeat(PASSES, 1), targets[train].repeat(PASSES)),
        TensorDataset(inputs[test], targets[test]),
        (64, 256, 256, 10), batch=32, rate=0.1, steps=600,
    )  # fmt: skip


def synthetic(rows: int = 12_000) -> Task:
    """Classes from a random net of two layers, with a tenth of the labels changed."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(rows, 32, generator=generator)
    hidden = torch.tanh(inputs @ torch.randn(32, 24, generator=generator) / 3)
    targets = (hidden @ torch.randn(24, 8, generator=generator)).argmax(1)
    changed = torch.rand(rows, generator=generator) < 0.1
    targets[changed] = torch.randint(0, 8, (int(changed.sum()),), generator=generator)
    cut = rows - 2000
    return Task(
        "synthetic", TensorDataset(inputs[:cut], targets[:cut]), TensorDataset(inputs[cut:], targets[cut:]),
        (32, 256, 256, 256, 8), batch=64, rate=0.1, steps=400,
    )  # fmt: skip


def laid_out(task: Task, workers: int, seed: int, *, dealt: bool, local_steps: int) -> tuple[RoundsKit, State]:
    """Set up a trial like the builder does."""
    torch.manual_seed(seed)
    candidate = task.candidate(task.widths, task.batch)
    training = Training(candidate, task.train, None, seed, CPU)
    pilot = task.train.tensors[0][:3]
    structure = find_structure(training.model, pilot, workers) if dealt else Structure()
    names = {id(parameter): name for name, parameter in training.model.named_parameters()}
    parts = OptimizerParts.of(training.optimizer, names)
    kit = RoundsKit(candidate, task.train, task.valid, seed, structure, workers, local_steps, True, parts)
    return kit, start(training, parts, workers)


def in_rounds(
    task: Task, workers: int, seed: int, steps: int, *, dealt: bool, local_steps: int = LOCAL_STEPS
) -> Trained:  # fmt: skip
    """Train in rounds of local phases: independent subnets, or local SGD if not `dealt`."""
    kit, state = laid_out(task, workers, seed, dealt=dealt, local_steps=local_steps)
    batches = len(task.train) // task.batch
    moved = peak = 0
    while state["position"]["steps"] < steps:
        results = {}
        for index in range(workers):
            phase = Phase(kit, state, state["position"]["turn"], index, CPU)
            if peak:
                phase.is_measured()
            phase.train_steps(min(local_steps, steps - state["position"]["steps"]))
            results[index] = phase.result()
            moved += phase.communicated
            peak = max(peak, phase.peak_bytes)
        state = assembled(kit, state, results)
        if state["position"]["batch"] + local_steps > share_of(batches, workers - 1, workers):
            state["position"] |= {"epoch": state["position"]["epoch"] + 1, "batch": 0}
    metrics, _ = judged(kit, state, CPU)
    return Trained(metrics["accuracy"], moved, peak)


def alone(task: Task, widths: tuple[int, ...], batch: int, seed: int, steps: int) -> Trained:
    """Train one worker with plain SGD."""
    torch.manual_seed(seed)
    training = Training(task.candidate(widths, batch), task.train, task.valid, seed, CPU)
    while training.steps < steps:
        progress = training.train_steps(steps - training.steps)
        if progress.epoch_done:
            training.epoch, training.batch = training.epoch + 1, 0
    return Trained(training.evaluate()["accuracy"], 0, training.peak_bytes)


def weights(widths: tuple[int, ...], n: int = 1) -> int:
    """Return the weights of a subnet by the paper's formula with biases; of the whole net for n = 1."""
    d, *hidden, classes = widths
    inner = sum(a * b for a, b in pairwise(hidden)) // n**2
    return d * hidden[0] // n + inner + hidden[-1] * classes // n + sum(hidden) // n + classes


def state_bytes(widths: tuple[int, ...], n: int = 1) -> int:
    """Return the bytes a subnet sends or receives: weights, batch-norm scale, shift, mean, variance and counters."""
    hidden = widths[1:-1]
    return 4 * (weights(widths, n) + 4 * sum(hidden) // n) + 8 * len(hidden)


def compare(task: Task, n: int, seeds: range, steps: int) -> dict[str, list[Trained]]:
    narrow = (task.widths[0], *(width // n for width in task.widths[1:-1]), task.widths[-1])
    equal_flops = max(1, round(steps * n * weights(task.widths, n) / weights(task.widths)))
    found: dict[str, list[Trained]] = {}
    for seed in seeds:
        systems = {
            "ist": in_rounds(task, n, seed, steps, dealt=True),
            "local SGD": in_rounds(task, n, seed, steps, dealt=False),
            "data parallel": alone(task, task.widths, n * task.batch, seed, steps),
            "narrow dense": alone(task, narrow, task.batch, seed, steps),
            "dense, equal FLOPs": alone(task, task.widths, task.batch, seed, equal_flops),
        }
        trained = 4 * (weights(task.widths) + 2 * sum(task.widths[1:-1]))
        gradients = 2 * trained * n * steps
        systems["data parallel"] = replace(systems["data parallel"], bytes=gradients)
        for name, system in systems.items():
            found.setdefault(name, []).append(system)
        print(f"{task.name} n={n} seed {seed}", file=sys.stderr, flush=True)
    return found


def percent(trained: list[Trained]) -> str:
    values = [100 * each.accuracy for each in trained]
    return f"{statistics.mean(values):.2f}% ({min(values):.2f} to {max(values):.2f})"


def gap(found: dict[str, list[Trained]]) -> float:
    """Return the mean lead of local SGD over seeds, in percentage points."""
    pairs = zip(found["local SGD"], found["ist"], strict=True)
    return statistics.mean(100 * (local.accuracy - ist.accuracy) for local, ist in pairs)


def main() -> None:
    quick = arguments(__doc__ or "").quick
    torch.set_num_threads(1)
    seeds = range(2 if quick else 5)
    rows: list[tuple[str, str]] = []
    document: dict[str, Any] = {}
    exact = True
    for task in [digits()] if quick else [digits(), synthetic()]:
        steps = 100 if quick else task.steps
        rounds = -(-steps // LOCAL_STEPS)
        for n in (2, 4, 8):
            found = compare(task, n, seeds, steps)
            for name, parts in (("ist", n), ("local SGD", 1)):
                expected = 2 * state_bytes(task.widths, parts) * n * rounds
                exact &= all(each.bytes == expected for each in found[name])
            ratio = found["local SGD"][0].bytes / found["ist"][0].bytes
            for name, trained in found.items():
                moved = f"{trained[0].bytes / 2**20:9.1f} MiB" if trained[0].bytes else " " * 13
                rows.append(
                    (f"{task.name}, n={n}, {name}", f"{percent(trained)}  {moved}  {trained[0].peak / 2**10:7.0f} KiB")
                )
            document[f"{task.name}_n{n}"] = {
                "steps_per_worker": steps, "bytes_vs_local_sgd": ratio, "accuracy_gap_points": gap(found),
                "accuracy": {name: statistics.mean(each.accuracy for each in t) for name, t in found.items()},
                "peak_bytes": {name: trained[0].peak for name, trained in found.items()},
            }  # fmt: skip
    document |= {
        "bytes_vs_local_sgd_n4": document["digits_n4"]["bytes_vs_local_sgd"],
        "accuracy_gap_points_n4": document["digits_n4"]["accuracy_gap_points"],
        "bytes_equal_formula": exact,
        "local_steps": LOCAL_STEPS, "seeds": len(seeds),
    }  # fmt: skip
    finish(rows, document)


if __name__ == "__main__":
    main()
