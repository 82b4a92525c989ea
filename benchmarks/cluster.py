"""Search on a Ray cluster of raylets on this machine: cost of a trial, also against Ray Tune there, and scaling.

The cost is that of a trivial objective of 5 parameters and 10 reports on two nodes of one CPU, from the first to the
last trial's end, so that start-up is excluded. Scaling is measured with objectives that sleep 0.5 s, on four nodes, as
a share of the ideal. `--against FOLDER` names another checkout with its .venv: the cost of a search without the flag
here is compared with that there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hydra_tune as ht
from benchmarks.overhead import hydra, ms_per_trial, objective, ray_tune
from benchmarks.report import finish, interleaved, ratios, spread
from tests.cluster.raylets import Raylets

SLEEP_SECONDS = 0.5
LOCAL = "import sys; from benchmarks.overhead import hydra; print(hydra(int(sys.argv[1])))"


def sleeping(trial: Any) -> float:
    time.sleep(SLEEP_SECONDS)
    return float(trial.suggest_float("x", 0.0, 1.0))


def on_cluster(address: str, build: Callable[[Any], float], trials: int) -> list[Any]:
    """Run a search on the cluster; return its trials."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        result = ht.search(
            build, trials=trials, sampler="random", cluster=address, storage=f"sqlite:///{folder}/hydra.db",
            progress=False,
        )  # fmt: skip
        found = result.study.trials
        result.close()
    assert len(found) == trials
    return found


def cost(address: str, trials: int) -> float:
    return ms_per_trial([trial.datetime_complete.timestamp() for trial in on_cluster(address, objective, trials)])


def scaling(address: str, nodes: int, trials: int) -> float:
    """Return the ideal seconds of sleeping trials, divided by those from the first begin to the last end."""
    found = on_cluster(address, sleeping, trials)
    began = min(trial.datetime_start.timestamp() for trial in found)
    return trials * SLEEP_SECONDS / nodes / (max(trial.datetime_complete.timestamp() for trial in found) - began)


def local_in(folder: Path, trials: int) -> float:
    """Return the cost of a trial of a search without the flag, by the hydra_tune of this checkout."""
    python = folder / ".venv" / "bin" / "python"
    done = subprocess.run([python, "-c", LOCAL, str(trials)], check=True, capture_output=True, text=True, cwd=folder)
    return float(done.stdout.split()[-1])


def tune_on(address: str, trials: int) -> float:
    import ray
    from ray import cloudpickle

    from benchmarks import overhead

    cloudpickle.register_pickle_by_value(overhead)  # nodes do not have this package
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        return ray_tune(trials)
    finally:
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a short run, to see that it works")
    parser.add_argument("--rounds", type=int, default=None, help="how often each system is measured")
    parser.add_argument("--against", type=Path, default=None, help="another checkout, with its .venv")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    rounds, scale = options.rounds or (1 if options.quick else 3), 0.2 if options.quick else 1.0
    raylets = Raylets()
    try:
        for _ in range(2):
            raylets.start(1)
        systems = {
            "ms_per_trial": lambda: cost(raylets.address, int(1000 * scale)),
            "local_ms_per_trial": lambda: hydra(int(1000 * scale)),
            "ray_tune_ms_per_trial": lambda: tune_on(raylets.address, int(100 * scale)),
        }
        measured = interleaved(systems, rounds)
        for _ in range(2):
            raylets.start(1)
        scales = interleaved({"scaling_4_nodes": lambda: scaling(raylets.address, 4, int(200 * scale))}, rounds)
    finally:
        raylets.close()
    everything = {**measured, **scales}
    everything["vs_ray_tune"] = ratios(measured["ray_tune_ms_per_trial"], measured["ms_per_trial"])
    if options.against:
        trials = int(1000 * scale)
        folders = {"here": Path(__file__).parents[1], "there": options.against}
        compared = interleaved({name: partial(local_in, folder, trials) for name, folder in folders.items()}, rounds)
        pairs = zip(compared["here"], compared["there"], strict=True)
        everything["local_overhead_change"] = [here / there - 1 for here, there in pairs]
    everything["simulated_vs_one_pool"] = [simulated()]
    finish(
        [(name, spread(values)) for name, values in everything.items()],
        {name: round(statistics.median(values), 4) for name, values in everything.items()},
    )


def simulated() -> float:
    """Return the makespan on 125 simulated nodes of 8 devices, relative to one pool of 1,000."""
    command = [sys.executable, "-m", "hydra_tune", "simulate", "--nodes", "125", "--devices", "8", "--trials", "10000"]
    done = subprocess.run([*command, "--json"], check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["vs_one_pool"])


if __name__ == "__main__":
    main()
