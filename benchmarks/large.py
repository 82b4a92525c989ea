"""Searches over models that are larger than a device: how well two devices are used, and how soon a trial begins.

Two searches take turns, each in a process of its own with a new database: `gpt2`, four GPT-2 of transformers with 6 to
9 layers of width 384, and `gpt_large`, examples/gpt_large.yaml. All train in shards on two CPU devices of one core and
96 MiB each. Counted is from the start of the first build to the end of the last training: `makespan_vs_bound` divides
it by the longest trial or half of all training, whichever is more; `devices_busy` is the share of it in which devices
train. `start_in_batches` is the most that a trial takes from the end of its build to its first step, without the first
second and without the time in which both devices train other trials, in batches of its own. The JSON has the worse of
the two searches under each key, and those of each under its name.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import arguments, finish, interleaved, spread

SEARCHES = ("gpt2", "gpt_large")
KEYS = ("makespan_vs_bound", "devices_busy", "start_in_batches")
MEMORY = "96MiB"
GRACE = 1.0
"""Seconds of a trial's start that are not counted in batches."""
TRAINING = ("forward", "backward", "step", "commit", "evaluate")
WIDTH = int(os.environ.get("WIDTH", "384"))
"""Width of the GPT-2, a multiple of 6."""
HEADS, LENGTH, ROWS, BATCH = 6, 128, 128, 8


def build(trial: Any) -> Any:
    """One GPT-2 of transformers with random weights, on random text."""
    import torch
    from torch.utils.data import TensorDataset
    from transformers import GPT2Config, GPT2LMHeadModel

    import hydra_tune as ht

    config = GPT2Config(
        vocab_size=512, n_positions=LENGTH, n_embd=WIDTH, n_head=HEADS, n_layer=trial.suggest_int("layers", 6, 9),
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    tokens = torch.randint(0, 512, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    return ht.Candidate(
        model=GPT2LMHeadModel(config), loss=of_logits,
        optimizer=functools.partial(torch.optim.AdamW, lr=trial.suggest_float("lr", 1e-5, 1e-3)),
        train=TensorDataset(tokens, tokens.roll(-1, 1)), batch_size=BATCH, epochs=2,
    )  # fmt: skip


def of_logits(outputs: Any, targets: Any) -> Any:
    from torch.nn import functional as F

    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())


def searched(name: str, folder: str, *, quick: bool) -> list[Any]:
    """Run a search, and return its recorded units."""
    import hydra_tune as ht
    from hydra_tune.coordinator.search import run_search
    from hydra_tune.coordinator.spec import read_spec
    from hydra_tune.storage import open_storage
    from hydra_tune.storage.queries import trial_units

    url, trials = f"sqlite:///{folder}/{name}.db", 2 if quick else 4
    if name == "gpt2":
        result = ht.search(
            build, trials=trials, devices="2xcpu", device_memory=MEMORY, strategy="shard", sampler="random", seed=2,
            storage=url, study=name, progress=False,
        )  # fmt: skip
    else:
        flags = {"storage": url, "trials": trials, "study": name, "progress": False, "epochs": 1 if quick else None}
        spec = read_spec(str(Path(__file__).parents[1] / "examples" / "gpt_large.yaml"), flags)
        result = run_search(spec.source, spec.settings, space=spec.space)
    assert result.completed == trials
    result.close()
    with open_storage(url, read_only=True) as storage:
        return list(trial_units(storage, name))


def figures(units: Sequence[Any]) -> dict[str, float]:
    """Return the figures of a search, by its units."""
    trained = [unit for unit in units if unit.device and unit.device.startswith("cpu:") and unit.kind in TRAINING]
    begun = min(unit.started for unit in units if unit.kind == "build")
    seconds = max(unit.started + unit.seconds for unit in trained) - begun
    work: dict[int, float] = defaultdict(float)
    for unit in trained:
        work[unit.number] += unit.seconds
    return {
        "makespan_vs_bound": seconds / max(max(work.values()), sum(work.values()) / 2),
        "devices_busy": sum(work.values()) / (2 * seconds),
        "start_in_batches": max(_start(units, trained, number) for number in work),
        "seconds": seconds,
    }


def _start(units: Sequence[Any], trained: Sequence[Any], number: int) -> float:
    """Return the batches that a trial could have trained from the end of its build to its first step."""
    built = max(unit.started + unit.seconds for unit in units if unit.number == number and unit.kind == "build")
    own = [unit for unit in trained if unit.number == number]
    first = min(unit.started for unit in own)
    batch = sum(unit.seconds for unit in own) / sum(unit.kind == "forward" and unit.shard == 0 for unit in own)
    waited = max(0.0, first - built - _both_busy(trained, number, built, first) - GRACE)
    return waited / batch


def _both_busy(trained: Sequence[Any], number: int, start: float, stop: float) -> float:
    """Return the seconds between `start` and `stop` in which both devices train other trials."""
    changes = []
    for unit in trained:
        a, b = max(start, unit.started), min(stop, unit.started + unit.seconds)
        if unit.number != number and a < b:
            changes += [(a, 1), (b, -1)]
    busy, at, found = 0, start, 0.0
    for moment, change in sorted(changes):
        found += moment - at if busy >= 2 else 0.0
        busy, at = busy + change, moment
    return found


def main() -> None:
    if "--search" in sys.argv:
        name, folder, quick = sys.argv[2:]
        print(json.dumps(figures(searched(name, folder, quick=bool(int(quick))))))
        return
    options = arguments(__doc__ or "")
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in SEARCHES}

    def run(name: str) -> float:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.large", "--search", name, folder, str(int(options.quick))]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        measured[name].append(json.loads(done.stdout.splitlines()[-1]))
        return measured[name][-1]["seconds"]

    rounds = options.rounds or (1 if options.quick else 3)
    interleaved({name: functools.partial(run, name) for name in SEARCHES}, rounds)
    middle = {
        name: {key: statistics.median(each[key] for each in found) for key in (*KEYS, "seconds")}
        for name, found in measured.items()
    }
    rows = [
        (f"{key}, {name}", spread([each[key] for each in measured[name]]))
        for key in (*KEYS, "seconds")
        for name in SEARCHES
    ]
    worst = {
        key: (min if key == "devices_busy" else max)(middle[name][key] for name in SEARCHES) for key in KEYS
    }  # fmt: skip
    finish(rows, {**worst, **middle, "device_memory": MEMORY, "rounds": rounds})


if __name__ == "__main__":
    main()
