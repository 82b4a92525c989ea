"""A model whose training state is eight times the device budget, against the same model with unlimited memory.

One CPU device of one core; throughput of training batches of 512 rows, in one process, so that only spilling differs.
The spill store is on tmpfs and on disk in turn; `without double buffering` loads no shard ahead.
"""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.report import arguments, finish, interleaved, ratios, spread
from hydra_tune.engine.launch import MEMORY_SETTINGS

WIDTH, LAYERS, BATCH, BATCHES = 1024, 40, 512, 4
STATE = LAYERS * WIDTH * (WIDTH + 1) * 12
BUDGET = STATE // 8


def run(place: str, budget: int, double_buffering: bool) -> None:
    """Train a few batches and print the seconds of one."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    import hydra_tune as ht
    from hydra_tune.spill.device_memory import DeviceMemory
    from hydra_tune.spill.store import SpillFiles
    from hydra_tune.strategies.shard.exchange import take_apart
    from hydra_tune.strategies.shard.prepare import make_kit, observe_candidate
    from hydra_tune.strategies.shard.skeleton import empty_parameters
    from hydra_tune.strategies.shard.trial import ShardedTrial
    from hydra_tune.training.loop import Training
    from hydra_tune.training.prepared import Prepared

    torch.set_num_threads(1)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    data = TensorDataset(torch.randn(BATCH * BATCHES, WIDTH), torch.randint(0, 10, (BATCH * BATCHES,)))
    made = ht.Candidate(
        model=nn.Sequential(*layers, nn.Linear(WIDTH, 10)), loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.Adam, lr=1e-5), train=data, batch_size=BATCH, epochs=100,
    )  # fmt: skip
    training = Training(made, data, None, 1, torch.device("cpu"))
    if not budget:
        _warm_then_time(training.train_for, training.end_epoch)
        return
    with tempfile.TemporaryDirectory(dir=place) as folder:
        prospect = observe_candidate(training, Path(place) / "hydra-tune-bench-profiles")
        kit = make_kit(prospect, prospect.shards(budget), Prepared(made, data, None), 1, training.named_tensors())
        files = SpillFiles([Path(folder)], "trial")
        take_apart(training.state(), kit.plan, kit.parts, files)
        empty_parameters(made.model)
        del training
        memory = DeviceMemory(budget, torch.device("cpu"), prefetch=double_buffering)
        trial = ShardedTrial(kit, memory, files)
        _warm_then_time(trial.train_for, trial.end_epoch)
        print(f"{len(kit.plan.shards)} shards, peak {memory.peak} of {budget} bytes", file=sys.stderr)
        memory.close()


def _warm_then_time(train: object, end_epoch: object) -> None:
    assert callable(train)
    assert callable(end_epoch)
    train(3600.0)
    end_epoch()
    began = time.perf_counter()
    train(3600.0)
    print((time.perf_counter() - began) / BATCHES)


def seconds(place: str, budget: int, double_buffering: bool = True) -> float:
    """Measure a batch in a separate process with a worker's memory settings."""
    environment = {**os.environ, **MEMORY_SETTINGS, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.spilling", "--run", place, str(budget), str(int(double_buffering))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return float(done.stdout.split()[-1])


def main() -> None:
    if "--run" in sys.argv:
        place, budget, double_buffering = sys.argv[-3:]
        run(place, int(budget), bool(int(double_buffering)))
        return
    options = arguments(__doc__ or "")
    disk = tempfile.gettempdir()
    measured = interleaved(
        {
            "unlimited": lambda: seconds(disk, 0),
            "tmpfs": lambda: seconds("/dev/shm", BUDGET),
            "disk": lambda: seconds(disk, BUDGET),
            "tmpfs, without double buffering": lambda: seconds("/dev/shm", BUDGET, False),
            "disk, without double buffering": lambda: seconds(disk, BUDGET, False),
        },
        options.rounds or (1 if options.quick else 5),
    )
    shares = {name: ratios(measured["unlimited"], values) for name, values in measured.items() if name != "unlimited"}
    rows = [(f"throughput against unlimited, {name}", spread(values)) for name, values in shares.items()]
    rows += [(f"seconds a batch, {name}", spread(values)) for name, values in measured.items()]
    middle = {name: statistics.median(values) for name, values in shares.items()}
    finish(rows, {
        "throughput_vs_unlimited": middle["tmpfs"], "throughput_vs_unlimited_disk": middle["disk"],
        "without_double_buffering": middle["tmpfs, without double buffering"],
        "without_double_buffering_disk": middle["disk, without double buffering"],
        "state_bytes": STATE, "device_memory": BUDGET, "batch": BATCH,
    })  # fmt: skip


if __name__ == "__main__":
    main()
