"""How long it takes to place a graph of 2,000 nodes, and how near the placements of small graphs come to the optimum.

The large graph is made of blocks of parallel branches, as captured models are; four devices whose memory is a tenth
more than it takes. `placement_seconds_2000_nodes` is one run of m-topo, m-etf and m-sct together. The small graphs, of
3 to 8 nodes on two or three devices, are compared with the optimum by branch and bound (benchmarks/optimal.py).
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from typing import Any

from benchmarks.optimal import optimal_makespan, random_instance
from benchmarks.report import arguments, finish, interleaved, spread
from hydra_tune.graph.placement import ALGORITHMS, PlacementInfeasible, place

NODES, DEVICES = 2000, 4
PLACERS = ("m-topo", "m-etf", "m-sct")


def large_graph(seed: int = 0) -> dict[str, Any]:
    """Blocks of one to four branches of one to five nodes, joined by a node that also takes the block's input."""
    rng = random.Random(seed)
    edges: dict[tuple[int, int], float] = {}
    joint, count = 0, 1
    while count < NODES - 25:
        ends = []
        for _ in range(rng.randint(1, 4)):
            end = joint
            for _ in range(rng.randint(1, 5)):
                edges[end, count] = rng.uniform(0.1, 1.0)
                end, count = count, count + 1
            ends.append(end)
        edges.update({(end, count): rng.uniform(0.1, 1.0) for end in (*ends, joint)})
        joint, count = count, count + 1
    while count < NODES:
        edges[count - 1, count] = rng.uniform(0.1, 1.0)
        count += 1
    memory = {node: rng.randint(1, 1000) for node in range(count)}
    return {
        "times": {node: rng.uniform(0.2, 3.0) for node in range(count)}, "memory": memory, "edges": edges,
        "devices": DEVICES, "capacity": 1.1 * sum(memory.values()) / DEVICES,
    }  # fmt: skip


def seconds(graph: dict[str, Any], *algorithms: str) -> float:
    """How long these placers take, one after the other."""
    began = time.perf_counter()
    for algorithm in algorithms:
        place(**graph, algorithm=algorithm)
    return time.perf_counter() - began


def ratios_to_optimal(graphs: int) -> dict[tuple[str, str], list[float]]:
    """Makespan over optimum, by placer and kind of graph."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    seed = 0
    while len(found["best", "all"]) < graphs:
        instance = random_instance(seed)
        seed += 1
        given = (instance.times, instance.memory, instance.edges)
        try:
            takes = {name: place(*given, algorithm=name, **instance.options).makespan for name in ALGORITHMS}
        except PlacementInfeasible:
            continue
        optimum = optimal_makespan(instance, takes["best"])
        assert optimum is not None
        takes["best of three"] = min(takes[name] for name in PLACERS)
        transfers = "small transfers" if instance.small_transfers else "large transfers"
        kind = transfers if instance.capacity is None else "with caps"
        for name, makespan in takes.items():
            found[name, kind].append(makespan / optimum)
            found[name, "all"].append(makespan / optimum)
    return found


def main() -> None:
    options = arguments(__doc__ or "")
    graph = large_graph()
    seconds(graph, *PLACERS)  # imports and first uses
    measured = interleaved(
        {
            "all three": lambda: seconds(graph, *PLACERS),
            "best, with its local search": lambda: seconds(graph, "best"),
            **{name: lambda name=name: seconds(graph, name) for name in PLACERS},
        },
        options.rounds or (2 if options.quick else 7),
    )
    ratios = ratios_to_optimal(100 if options.quick else 500)
    rows = [(f"seconds for {NODES} nodes, {name}", spread(values)) for name, values in measured.items()]
    for (name, kind), values in sorted(ratios.items()):
        text = f"mean {statistics.mean(values):.4f}, worst {max(values):.3f}, of {len(values)}"
        rows.append((f"makespan to optimum, {name}, {kind}", text))
    best = ratios["best", "all"]
    finish(rows, {
        "placement_seconds_2000_nodes": statistics.median(measured["all three"]),
        "best_seconds_2000_nodes": statistics.median(measured["best, with its local search"]),
        "mean_ratio_to_optimal": statistics.mean(best), "max_ratio_to_optimal": max(best),
        "mean_ratio_small_transfers": statistics.mean(ratios["best", "small transfers"]),
        "mean_ratio_large_transfers": statistics.mean(ratios["best", "large transfers"]),
        "mean_ratio_with_caps": statistics.mean(ratios["best", "with caps"]),
        "mean_ratio_without_local_search": statistics.mean(ratios["best of three", "all"]),
    })  # fmt: skip


if __name__ == "__main__":
    main()
