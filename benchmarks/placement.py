"""Time to place a graph of 2,000 nodes, and distance of small graphs' placements from the optimum.

The large graph consists of blocks of parallel branches, like captured models; four devices have a tenth more memory
than needed. `placement_seconds_2000_nodes` is one run of m-topo, m-etf and m-sct together. The small graphs, of 3 to 8
nodes on two or three devices, are compared with the optimum by branch and bound (benchmarks/optimal.py). Last, two
networks are trained in a pipeline on two CPU devices, and the predicted step time is compared with the measured one.
"""

from __future__ import annotations

import functools
import random
import statistics
import tempfile
import time
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hydra_tune as ht
from benchmarks.optimal import optimal_makespan, random_instance
from benchmarks.report import arguments, finish, interleaved, spread
from hydra_tune.graph.placement import ALGORITHMS, PlacementInfeasible, place

NODES, DEVICES = 2000, 4
PLACERS = ("m-topo", "m-etf", "m-sct")


def large_graph(seed: int = 0) -> dict[str, Any]:
    """Return blocks of 1 to 4 branches of 1 to 5 nodes, joined by a node that also takes the block's input."""
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
    """Return the seconds that these placers take, one after the other."""
    began = time.perf_counter()
    for algorithm in algorithms:
        place(**graph, algorithm=algorithm)
    return time.perf_counter() - began


def ratios_to_optimal(graphs: int) -> dict[tuple[str, str], list[float]]:
    """Return makespan over optimum, by placer and kind of graph."""
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


class Inception(nn.Module):
    """Concatenated branches of different depth, in blocks."""

    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 3 * width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.ModuleList(self._branch(3 * width, width, depth) for depth in (1, 2, 3)) for _ in range(blocks)
        )
        self.head = nn.Linear(3 * width, 10)

    @staticmethod
    def _branch(before: int, width: int, depth: int) -> nn.Sequential:
        layers: list[nn.Module] = [nn.Conv2d(before, width, 1), nn.ReLU()]
        for _ in range(depth - 1):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.cat([branch(x) for branch in block], 1)  # type: ignore[union-attr]
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self, width: int = 256, blocks: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(blocks))
        )
        self.head = nn.Linear(width, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(x))[:, -1])  # type: ignore[no-any-return]


def build(trial: Any, network: str) -> ht.Candidate:
    lr = trial.suggest_float("lr", 1e-4, 1e-3)
    generator = torch.Generator().manual_seed(1)
    rows, size = (384, 64) if network == "transformer" else (256, 64)
    inputs = torch.randn(rows, 3, 32, 32, generator=generator)
    if network == "transformer":
        inputs = torch.randint(0, 64, (rows, 64), generator=generator)
    return ht.Candidate(
        model=Transformer() if network == "transformer" else Inception(), loss=nn.functional.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=lr), batch_size=size, epochs=2,
        train=TensorDataset(inputs, torch.randint(0, 10, (rows,), generator=generator)),
    )  # fmt: skip


def measured_to_predicted(network: str) -> float:
    """Return a step's measured time over its predicted time."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        result = ht.search(
            functools.partial(build, network=network), trials=1, devices="2xcpu", seed=1, progress=False,
            storage=f"sqlite:///{folder}/placement.db", checkpoint_seconds=3600, concurrency=1,
            strategy={"name": "pipeline", "microbatches": 4},
        )  # fmt: skip
        plan = result.trials[0].plan
        result.close()
    assert plan is not None
    return float(plan["measured_step_ms"]) / float(plan["predicted_step_ms"])


def main() -> None:
    options = arguments(__doc__ or "")
    graph = large_graph()
    seconds(graph, *PLACERS)  # warm up imports and caches
    measured = interleaved(
        {
            "all three": lambda: seconds(graph, *PLACERS),
            "best, with its local search": lambda: seconds(graph, "best"),
            **{name: lambda name=name: seconds(graph, name) for name in PLACERS},
        },
        options.rounds or (2 if options.quick else 7),
    )
    steps = interleaved(
        {name: functools.partial(measured_to_predicted, name) for name in ("inception", "transformer")},
        options.rounds or (1 if options.quick else 5),
    )
    ratios = ratios_to_optimal(100 if options.quick else 500)
    rows = [(f"seconds for {NODES} nodes, {name}", spread(values)) for name, values in measured.items()]
    for (name, kind), values in sorted(ratios.items()):
        text = f"mean {statistics.mean(values):.4f}, worst {max(values):.3f}, of {len(values)}"
        rows.append((f"makespan to optimum, {name}, {kind}", text))
    rows += [(f"measured step to predicted, {name}", spread(values)) for name, values in steps.items()]
    best = ratios["best", "all"]
    finish(rows, {
        "placement_seconds_2000_nodes": statistics.median(measured["all three"]),
        "best_seconds_2000_nodes": statistics.median(measured["best, with its local search"]),
        "mean_ratio_to_optimal": statistics.mean(best), "max_ratio_to_optimal": max(best),
        "mean_ratio_small_transfers": statistics.mean(ratios["best", "small transfers"]),
        "mean_ratio_large_transfers": statistics.mean(ratios["best", "large transfers"]),
        "mean_ratio_with_caps": statistics.mean(ratios["best", "with caps"]),
        "mean_ratio_without_local_search": statistics.mean(ratios["best of three", "all"]),
        **{f"measured_to_predicted_{name}": statistics.median(values) for name, values in steps.items()},
    })  # fmt: skip


if __name__ == "__main__":
    main()
