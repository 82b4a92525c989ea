"""Time of the pure parts on large problems: cutting a model of 1,000 nodes, simulating 10,000 trials on 1,000 devices.

Results are in seconds, not ratios: there is nothing to compare with, and the targets are in seconds too.
"""

from __future__ import annotations

import random
import statistics
import time

from benchmarks.report import arguments, finish, spread
from hydra_tune.engine.scenario import Scenario
from hydra_tune.engine.simulator import simulate
from hydra_tune.graph.costs import NodeCost
from hydra_tune.graph.partition import MIB, partition

NODES = 1000
POLICIES = ("lrtf", "lazy-lrtf", "fifo", "srtf", "random")


def model(seed: int) -> list[NodeCost]:
    """Return nodes of different sizes, some of which reuse one parameter."""
    draw = random.Random(seed)
    return [
        NodeCost(
            name=str(index), forward_seconds=draw.random(), backward_seconds=2 * draw.random(), step_seconds=0.1,
            parameter_bytes=draw.randrange(MIB), optimizer_bytes=draw.randrange(2 * MIB), buffer_bytes=0,
            largest_parameter_bytes=draw.randrange(MIB), activation_bytes=draw.randrange(MIB), forward_peak_bytes=0,
            backward_peak_bytes=draw.randrange(MIB), boundary_bytes=draw.randrange(MIB),
            tied={"w": MIB} if index % 100 == 99 else {}, shared={"w": MIB} if index == 0 else {},
        )
        for index in range(NODES)
    ]  # fmt: skip


def seconds_to_cut(seed: int) -> float:
    nodes = model(seed)
    began = time.perf_counter()
    partition(nodes, 64 * MIB)
    return time.perf_counter() - began


def main() -> None:
    options = arguments(__doc__ or "")
    rounds = options.rounds or (3 if options.quick else 9)
    trials, devices = (1000, 100) if options.quick else (10_000, 1000)
    cuts = [1000 * seconds_to_cut(seed) for seed in range(rounds)]
    rows = [(f"partition of {NODES} nodes, ms", spread(cuts))]
    document: dict[str, float | int] = {"partition_ms": statistics.median(cuts), "trials": trials, "devices": devices}
    for policy in POLICIES:
        began = time.perf_counter()
        outcome = simulate(Scenario(trials=trials, devices=devices, concurrency=trials, policy=policy))
        taken = document[f"simulate_seconds_{policy}"] = time.perf_counter() - began
        bound = f"makespan {outcome.makespan_vs_bound:.4f} of the bound"
        rows.append((f"{trials:,} trials on {devices:,} devices by {policy}, s", f"{taken:.1f}; {bound}"))
    finish(rows, document)


if __name__ == "__main__":
    main()
