"""Four trials whose training state is four times the device budget, on two CPU devices of one core each.

`shard` is Hydra Tune: shards of all trials on both devices. `model parallel` trains one trial at a time in the same
shards, shard i on device i mod 2, with the same prefetching on both. It is simulated in one process with two device
memories, so that handing a boundary from one device to the other costs it nothing: what it would really reach is
less. `ideal` is task parallelism with everything in memory. All train the same batches; the time is that between the
start of the first training step and the end of the last.

How much is computed for each byte moved goes with the rows of a batch: `ROWS=512 python -m benchmarks.shard_parallel`.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hydra_tune as ht
from benchmarks.report import arguments, finish, interleaved, ratios, spread
from hydra_tune.engine.process import MEMORY_SETTINGS

WIDTH, LAYERS, BATCHES, TRIALS = 1024, 32, 12, 4
BATCH = int(os.environ.get("ROWS", "1024"))
"""Rows a batch: what a shard computes each time it is brought in. For a transformer it would be the tokens."""
STATE = LAYERS * WIDTH * (WIDTH + 1) * 12
"""Bytes of float32 weights and Adam's two moments."""
BUDGET = STATE // 4


def candidate(lr: float) -> ht.Candidate:
    """An MLP whose layers are large matrices."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH * BATCHES, WIDTH, generator=generator)
    targets = torch.randint(0, 10, (BATCH * BATCHES,), generator=generator)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return ht.Candidate(
        model=nn.Sequential(*layers, nn.Linear(WIDTH, 10)), loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.Adam, lr=lr), train=TensorDataset(inputs, targets), batch_size=BATCH,
        epochs=1,
    )  # fmt: skip


def build(trial: Any) -> ht.Candidate:
    return candidate(trial.suggest_float("lr", 1e-5, 1e-4))


class Run:
    """What a search recorded of its training steps."""

    def __init__(self, folder: str, **options: Any) -> None:
        from hydra_tune.storage import open_storage
        from hydra_tune.storage.queries import trial_units

        url = f"sqlite:///{folder}/units.db"
        result = ht.search(
            build, trials=TRIALS, devices="2xcpu", concurrency=TRIALS, sampler="random", seed=1, storage=url,
            progress=False, checkpoint_seconds=3600, study=f"run-{time.time_ns()}", **options,
        )  # fmt: skip
        assert result.completed == TRIALS
        with open_storage(url, read_only=True) as storage:
            units = trial_units(storage, result.study.study_name)
        result.close()
        self.units = [unit for unit in units if unit.device and unit.device.startswith("cpu:")]
        training = ("train", "forward", "forward-backward", "backward", "step", "commit")
        self.trained = [unit for unit in self.units if unit.kind in training]
        begun = min(unit.started for unit in self.trained)
        self.seconds = max(unit.started + unit.seconds for unit in self.trained) - begun

    @property
    def utilization(self) -> float:
        """The share of the devices' time in which they trained."""
        return sum(unit.seconds for unit in self.trained) / (2 * self.seconds)

    @property
    def makespan_vs_bound(self) -> float:
        """Against the longest trial, or all work spread evenly over the devices."""
        work: dict[int, float] = {}
        for unit in self.trained:
            work[unit.number] = work.get(unit.number, 0.0) + unit.seconds
        return self.seconds / max(max(work.values()), sum(work.values()) / 2)

    @property
    def residency(self) -> float:
        """The share of batches whose device trained the same trial in the batch before."""
        batches = sorted((u for u in self.trained if u.kind == "forward-backward"), key=lambda unit: unit.started)
        same, last = [], dict[str, int]()
        for unit in batches:
            if unit.device in last:
                same.append(last[unit.device] == unit.number)
            last[unit.device] = unit.number
        return statistics.mean(same) if same else 0.0

    def overheads(self) -> list[float]:
        """Seconds between the end of one step and the start of the next on the same device, while it had work."""
        found = []
        for device in ("cpu:0", "cpu:1"):
            own = sorted((u for u in self.trained if u.device == device), key=lambda unit: unit.started)
            found += [b.started - (a.started + a.seconds) for a, b in itertools.pairwise(own)]
        return found


RUNS: dict[str, list[Run]] = {}


def measured(name: str, folder: str, **options: Any) -> float:
    run = Run(folder, **options)
    RUNS.setdefault(name, []).append(run)
    return run.seconds


def model_parallel() -> float:
    """In a process of its own, with one thread to compute and one a device to bring shards in."""
    command = [sys.executable, "-m", "benchmarks.shard_parallel", "--one-trial-at-a-time"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=_worker_environment())
    return float(done.stdout.split()[-1])


def _worker_environment() -> dict[str, str]:
    return {**os.environ, **MEMORY_SETTINGS, "OMP_NUM_THREADS": "1"}


def one_trial_at_a_time() -> None:
    """Train all trials one after another, shard i on device i mod 2; print the seconds."""
    from hydra_tune.builds import Prepared
    from hydra_tune.engine.spill import SpillFiles
    from hydra_tune.shards.exchange import take_apart
    from hydra_tune.shards.prepare import examine, hollow, make_kit
    from hydra_tune.shards.trial import ShardedTrial
    from hydra_tune.training import Training

    torch.set_num_threads(1)
    total = 0.0
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        for number in range(TRIALS):
            made = candidate(1e-5 * (number + 1))
            training = Training(made, made.train, None, number, torch.device("cpu"))
            prospect = examine(training, Path(place) / "profiles")
            prepared = Prepared(made, made.train, None)
            kit = make_kit(prospect, prospect.shards(BUDGET), prepared, number, BUDGET, training.named_tensors())
            files = SpillFiles([Path(place)], f"trial-{number}")
            take_apart(training.state(), kit.plan, kit.parts, files)
            hollow(made.model)
            del training
            devices = TwoDevices(BUDGET)
            trial = ShardedTrial(kit, devices, files)  # type: ignore[arg-type]
            _follow_shards(trial, devices)
            began = time.perf_counter()
            while not trial.train_for(1.0).epoch_done:
                pass
            total += time.perf_counter() - began
            devices.close()
            files.remove()
    print(total)


class TwoDevices:
    """Two device memories behind one face: each block is on the device of its shard."""

    def __init__(self, budget: int) -> None:
        from hydra_tune.engine.device_memory import DeviceMemory

        self.device = torch.device("cpu")
        self.budget = 2 * budget
        self.both = [DeviceMemory(budget, self.device) for _ in range(2)]
        self.at = 0
        """The device that computes."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "running":
            for memory in self.both:
                memory.running = value

    def _of(self, files: Any, key: str) -> Any:
        shard = key.split("/")[1]
        if key[0] in "xd":  # a boundary is where it was made, and costs nothing to hand over
            return next((memory for memory in self.both if memory.holds(files, key)), self.both[self.at])
        return self.both[int(shard) % 2]

    def reserve(self, size: int) -> None:
        self.both[self.at].reserve(size)

    def acquire(self, files: Any, key: str, due: float) -> Any:
        return self._of(files, key).acquire(files, key, due)

    def new(self, files: Any, key: str, size: int) -> Any:
        return self._of(files, key).new(files, key, size)

    def adopt(self, files: Any, key: str, content: Any, due: float) -> None:
        self._of(files, key).adopt(files, key, content, due)

    def release(self, files: Any, key: str, due: float, **options: Any) -> None:
        self._of(files, key).release(files, key, due, **options)

    def holds(self, files: Any, key: str) -> bool:
        return any(memory.holds(files, key) for memory in self.both)

    def discard(self, files: Any, key: str) -> None:
        self._of(files, key).discard(files, key)

    def prefetch(self, wanted: Any) -> None:
        for files, key, due in wanted:
            self._of(files, key).prefetch([(files, key, due)])

    def flush(self, files: Any) -> None:
        for memory in self.both:
            memory.flush(files)

    def forget(self, files: Any, *, outdated_only: bool = False) -> None:
        for memory in self.both:
            memory.forget(files, outdated_only=outdated_only)

    def close(self) -> None:
        for memory in self.both:
            memory.close()


def _follow_shards(trial: Any, devices: TwoDevices) -> None:
    """Let the device that computes be that of the shard whose step runs."""
    plain = trial.runner.step

    @contextmanager
    def step(shard: Any, position: int, reserve: int) -> Iterator[Any]:
        devices.at = shard.index % 2
        with plain(shard, position, reserve) as running:
            yield running

    trial.runner.step = step


def main() -> None:
    if "--one-trial-at-a-time" in sys.argv:
        one_trial_at_a_time()
        return
    options = arguments(__doc__ or "")
    rounds = options.rounds or (1 if options.quick else 5)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        sharded = {"device_memory": BUDGET, "strategy": "shard"}
        measured("warm-up", folder, **sharded)  # its profile is kept for the others
        seconds = interleaved(
            {
                "shard": lambda: measured("shard", folder, **sharded),
                "model parallel": model_parallel,
                "ideal": lambda: measured("ideal", folder, strategy="whole"),
                "lrtf": lambda: measured("lrtf", folder, device_memory=BUDGET,
                                         strategy={"name": "shard", "policy": "lrtf"}),
                "shard, all fits": lambda: measured("shard, all fits", folder, device_memory="4GiB", strategy="shard"),
            },
            rounds,
        )  # fmt: skip
    _report(seconds)


def _report(seconds: dict[str, list[float]]) -> None:
    speedup = ratios(seconds["model parallel"], seconds["shard"])
    fraction = ratios(seconds["ideal"], seconds["shard"])
    fits = ratios(seconds["shard, all fits"], seconds["ideal"])
    runs = RUNS["shard"]
    figures = {
        "speedup_vs_model_parallel": speedup,
        "fraction_of_ideal": fraction,
        "utilization": [run.utilization for run in runs],
        "same_model_residency": [run.residency for run in runs],
        "same_model_residency_lrtf": [run.residency for run in RUNS["lrtf"]],
        "makespan_vs_bound": [run.makespan_vs_bound for run in runs],
        "time_vs_whole_when_all_fits": fits,
    }
    overhead = statistics.median([gap for run in runs for gap in run.overheads()]) * 1000
    rows = [(name, spread(values)) for name, values in figures.items()]
    rows += [(f"seconds, {name}", spread(values)) for name, values in seconds.items()]
    rows.append(("unit_overhead_ms", f"{overhead:.3f}"))
    finish(rows, {
        **{name: statistics.median(values) for name, values in figures.items()}, "unit_overhead_ms": overhead,
        "state_bytes": STATE, "device_memory": BUDGET, "rows": BATCH, "rounds": len(speedup),
    })  # fmt: skip


if __name__ == "__main__":
    main()
