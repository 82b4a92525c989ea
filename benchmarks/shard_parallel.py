"""Four trials whose training state is four times the device budget, on two CPU devices of one core each.

`shard` is Hydra Tune: shards of all trials on both devices. `model parallel` trains one trial at a time in the same
shards, shard i on device i mod 2, with the same prefetching on both; it is simulated, in its favour
(`benchmarks.model_parallel`). `ideal` is task parallelism with everything in memory, `all fits` is `shard` with a
budget for that. All train the same batches. They take turns, three batches of each trial at a time, in processes that
sleep meanwhile, so that all meet the same conditions; a round's figure is the ratio of neighbouring turns.

Utilisation and residency come from an uninterrupted search, and from one by plain lrtf.

The computation per byte moved grows with the rows of a batch: `ROWS=512 python -m benchmarks.shard_parallel`.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hydra_tune as ht
from benchmarks.players import Gate, Player
from benchmarks.report import arguments, finish, interleaved, ratios, spread

WIDTH, LAYERS, BATCHES, TRIALS = 1024, 32, 12, 4
BATCH = int(os.environ.get("ROWS", "1024"))
"""Rows per batch, the work of a shard each time it is loaded. For a transformer it would be the tokens."""
STATE = LAYERS * WIDTH * (WIDTH + 1) * 12
"""Bytes of float32 weights and Adam's two moments."""
BUDGET = STATE // 4
A_TURN = 3
"""Batches of each trial per turn: enough that waiting at the ends of a turn counts for little."""
MODULE = "benchmarks.shard_parallel"
SEARCHES: dict[str, dict[str, Any]] = {
    "shard": {"device_memory": BUDGET, "strategy": "shard"},
    "lrtf": {"device_memory": BUDGET, "strategy": {"name": "shard", "policy": "lrtf"}},
    "ideal": {"strategy": "whole"},
    "all fits": {"device_memory": "4GiB", "strategy": "shard"},
}


def candidate(lr: float, batches: int) -> ht.Candidate:
    """An MLP whose layers are large matrices."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH * batches, WIDTH, generator=generator)
    targets = torch.randint(0, 10, (BATCH * batches,), generator=generator)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return ht.Candidate(
        model=nn.Sequential(*layers, nn.Linear(WIDTH, 10)), loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.Adam, lr=lr), train=TensorDataset(inputs, targets), batch_size=BATCH,
        epochs=1,
    )  # fmt: skip


def build(trial: Any, batches: int) -> ht.Candidate:
    return candidate(trial.suggest_float("lr", 1e-5, 1e-4), batches)


def searched(name: str, folder: str, batches: int = BATCHES) -> list[Any]:
    """Search with all trials at once; return the recorded units."""
    from hydra_tune.storage import open_storage
    from hydra_tune.storage.queries import trial_units

    url = f"sqlite:///{folder}/units.db"  # one database for all, so that they share a profile
    result = ht.search(
        functools.partial(build, batches=batches), trials=TRIALS, devices="2xcpu", concurrency=TRIALS,
        sampler="random", seed=1, storage=url, progress=False, checkpoint_seconds=3600, study=f"run-{time.time_ns()}",
        **SEARCHES[name],
    )  # fmt: skip
    assert result.completed == TRIALS
    with open_storage(url, read_only=True) as storage:
        units = trial_units(storage, result.study.study_name)
    result.close()
    return list(units)


class Run:
    """Recorded training steps of a search."""

    def __init__(self, name: str, folder: str) -> None:
        training = ("train", "forward", "backward", "step", "commit")
        on_devices = (unit for unit in searched(name, folder) if unit.device and unit.device.startswith("cpu:"))
        self.trained = [unit for unit in on_devices if unit.kind in training]
        begun = min(unit.started for unit in self.trained)
        self.seconds = max(unit.started + unit.seconds for unit in self.trained) - begun

    @property
    def utilization(self) -> float:
        """Share of the devices' time spent training."""
        return sum(unit.seconds for unit in self.trained) / (2 * self.seconds)

    @property
    def makespan_vs_bound(self) -> float:
        """Makespan relative to the longest trial, or to all work spread evenly over the devices."""
        work: dict[int, float] = {}
        for unit in self.trained:
            work[unit.number] = work.get(unit.number, 0.0) + unit.seconds
        return self.seconds / max(max(work.values()), sum(work.values()) / 2)

    @property
    def residency(self) -> float:
        """Share of batches whose device trained the same trial in the previous batch."""
        batches = sorted(
            (u for u in self.trained if u.kind == "forward" and u.shard == 0), key=lambda unit: unit.started
        )
        same, last = [], dict[str, int]()
        for unit in batches:
            if unit.device in last:
                same.append(last[unit.device] == unit.number)
            last[unit.device] = unit.number
        return statistics.mean(same) if same else 0.0

    def overhead(self, *, between_units: bool) -> float:
        """Return the median seconds between the end of a step and the start of the next on the same device.

        With `between_units`, only before the first step of a unit, here a batch: includes dispatch and fetching its
        rows.
        """
        found = []
        for device in ("cpu:0", "cpu:1"):
            own = sorted((u for u in self.trained if u.device == device), key=lambda unit: unit.started)
            found += [
                b.started - (a.started + a.seconds)
                for a, b in itertools.pairwise(own)
                if not between_units or (b.kind == "forward" and b.shard == 0)
            ]
        return statistics.median(found)


def play_search(name: str, folder: str, batches: int) -> None:
    """Play a search whose every batch waits for its turn."""
    from hydra_tune.strategies.shard import strategy as shard
    from hydra_tune.strategies.whole import strategy as whole

    whole.SLICE_SECONDS = shard.SLICE_SECONDS = 0.0  # a unit is a batch
    gate = Gate()
    gate.guard(shard.InShards, "train")
    gate.guard(whole.OnOneDevice, "train")
    searched(name, folder, batches)


def turns(folder: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of three batches of each trial, for each system, without the first turn.

    Model parallelism has one trial, which makes the batches of all: they take the same time one after another.
    """
    batches = A_TURN * (1 + rounds) + 1  # the last one, with the end of the search, is outside all turns
    searches = {
        name: Player(MODULE, ["--search", name, folder, str(batches)]) for name in ("shard", "ideal", "all fits")
    }
    alone = Player(MODULE, ["--model-parallel", str(TRIALS * batches)])
    systems: dict[str, Callable[[], float]] = {
        name: functools.partial(player.turn, range(TRIALS), A_TURN) for name, player in searches.items()
    }
    systems["model parallel"] = functools.partial(alone.turn, [0], TRIALS * A_TURN)
    for start in systems.values():
        start()
    seconds = interleaved(systems, rounds)
    for player in (*searches.values(), alone):
        player.finish()
    return seconds


def main() -> None:
    if "--search" in sys.argv:
        name, folder, batches = sys.argv[2:]
        play_search(name, folder, int(batches))
        return
    if "--model-parallel" in sys.argv:
        from benchmarks.model_parallel import play

        play(candidate(1e-5, int(sys.argv[2])), BUDGET)
        return
    options = arguments(__doc__ or "")
    rounds = options.rounds or (1 if options.quick else 7)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        lazy, plain = Run("shard", folder), Run("lrtf", folder)
        _report(turns(folder, rounds), lazy, plain)


def _report(seconds: dict[str, list[float]], lazy: Run, plain: Run) -> None:
    measured = {
        "speedup_vs_model_parallel": ratios(seconds["model parallel"], seconds["shard"]),
        "fraction_of_ideal": ratios(seconds["ideal"], seconds["shard"]),
        "ideal_vs_model_parallel": ratios(seconds["model parallel"], seconds["ideal"]),
        "time_vs_whole_when_all_fits": ratios(seconds["all fits"], seconds["ideal"]),
    }
    counted = {
        "utilization": lazy.utilization, "makespan_vs_bound": lazy.makespan_vs_bound,
        "same_model_residency": lazy.residency, "same_model_residency_lrtf": plain.residency,
        "unit_overhead_ms": 1000 * lazy.overhead(between_units=False),
        "between_batches_ms": 1000 * lazy.overhead(between_units=True),
    }  # fmt: skip
    rows = [(name, spread(values)) for name, values in measured.items()]
    rows += [(name, f"{value:.3f}") for name, value in counted.items()]
    rows += [(f"seconds a turn, {name}", spread(values)) for name, values in seconds.items()]
    finish(rows, {
        **{name: statistics.median(values) for name, values in measured.items()}, **counted,
        "state_bytes": STATE, "device_memory": BUDGET, "rows": BATCH, "rounds": len(seconds["shard"]),
    })  # fmt: skip


if __name__ == "__main__":
    main()
