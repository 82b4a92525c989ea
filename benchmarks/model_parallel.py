"""Model parallelism for `benchmarks.shard_parallel`: one trial at a time, shard i on device i mod 2.

It trains in the same shards with the same prefetching, in one process: one thread computes, and one per device memory
loads shards. Passing a boundary between devices is free here, so a real system would reach less.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import hydra_tune as ht
from hydra_tune.spill.device_memory import DeviceMemory
from hydra_tune.spill.store import SpillFiles
from hydra_tune.strategies.shard.exchange import take_apart
from hydra_tune.strategies.shard.prepare import make_kit, observe_candidate
from hydra_tune.strategies.shard.skeleton import empty_parameters
from hydra_tune.strategies.shard.trial import ShardedTrial
from hydra_tune.training.loop import Training
from hydra_tune.training.prepared import Prepared


def play(made: ht.Candidate, budget: int) -> None:
    """Play one trial: make as many steps as each turn asks for."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        training = Training(made, made.train, None, 0, torch.device("cpu"))
        prospect = observe_candidate(training, Path(place) / "profiles")
        prepared = Prepared(made, made.train, None)
        kit = make_kit(prospect, prospect.shards(budget), prepared, 0, training.named_tensors())
        files = SpillFiles([Path(place)], "trial")
        take_apart(training.state(), kit.plan, kit.parts, files)
        empty_parameters(made.model)
        del training
        devices = TwoDevices(budget)
        trial = ShardedTrial(kit, devices, files)  # type: ignore[arg-type]
        _follow_shards(trial, devices)
        for line in sys.stdin:
            _trials, steps = json.loads(line)
            began = time.perf_counter()
            for _ in range(steps):
                trial.train_for(0.0)
            print(time.perf_counter() - began, flush=True)
        devices.close()
        files.remove()


class TwoDevices:
    """Two device memories behind one interface: each block is on the device of its shard."""

    def __init__(self, budget: int) -> None:
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
        if key[0] in "xd":  # a boundary stays where it was made, and passing it is free
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
    """Switch the computing device to that of the shard whose step runs."""
    plain = trial.runner.step

    @contextmanager
    def step(shard: Any, position: int, reserve: int) -> Iterator[Any]:
        devices.at = shard.index % 2
        with plain(shard, position, reserve) as running:
            yield running

    trial.runner.step = step
