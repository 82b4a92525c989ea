"""One model on two CPU devices of one core each: against one device, against torch's own pipeline, and two at once.

All train the same network on the same batches in the same micro-batches. `torch` is torch.distributed.pipelining with
Schedule1F1B between two processes over gloo, cut at the same layer. A step is measured from the batch to the end of
the optimizer's step, and its median over a run counts.
"""

from __future__ import annotations

import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hydra_tune as ht
from benchmarks.report import arguments, finish, interleaved, ratios, spread
from hydra_tune.engine.process import MEMORY_SETTINGS

WIDTH, LAYERS, BATCH, BATCHES, MICROBATCHES = 768, 8, 4096, 10, 8
FILLING = 4
"""Micro-batches where two trials run at once: more gaps to fill."""


def network() -> nn.Sequential:
    """Layers of one size; the last one is small, so that halves are as even as they can be."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def data(batches: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH * batches, WIDTH, generator=generator)
    return inputs, torch.randint(0, 10, (BATCH * batches,), generator=generator)


def build(trial: Any) -> ht.Candidate:
    lr = trial.suggest_float("lr", 1e-4, 1e-3)
    return ht.Candidate(
        model=network(), loss=nn.functional.cross_entropy, optimizer=functools.partial(torch.optim.SGD, lr=lr),
        train=TensorDataset(*data(BATCHES)), batch_size=BATCH, epochs=1,
    )  # fmt: skip


def searched(folder: str, strategy: Any, trials: int = 1, at_once: int = 1) -> tuple[Any, list[Any]]:
    """The trials of a search, and their units on devices."""
    from hydra_tune.storage import open_storage
    from hydra_tune.storage.queries import trial_units

    url = f"sqlite:///{folder}/pipeline.db"
    result = ht.search(
        build, trials=trials, devices="2xcpu", concurrency=at_once, sampler="random", seed=1, storage=url,
        progress=False, checkpoint_seconds=3600, study=f"run-{time.time_ns()}", strategy=strategy,
    )  # fmt: skip
    assert result.completed == trials
    with open_storage(url, read_only=True) as storage:
        units = trial_units(storage, result.study.study_name)
    records = result.trials
    result.close()
    return records, [unit for unit in units if unit.kind in ("train", "forward", "backward", "step")]


def one_device(folder: str) -> float:
    """A unit trains for about a second: one batch here, or several on a quicker machine."""
    _, units = searched(folder, "whole")
    seconds = [unit.seconds for unit in units if unit.kind == "train"]
    if len(seconds) == BATCHES:
        return statistics.median(seconds)
    return sum(seconds) / BATCHES


def pipelined(folder: str) -> float:
    records, _ = searched(folder, {"name": "pipeline", "microbatches": MICROBATCHES})
    return float(records[0].plan["measured_step_ms"]) / 1000


def two_trials(folder: str, *, at_once: bool, placer: str = "balanced") -> float:
    """Seconds for a step of each of two trials: at once they overlap, else they follow each other.

    Of each trial the median step counts: the second one starts some steps after the first, which is then alone. Both
    ways have the same stages; by itself a trial would get others, which leave no gaps on one of the devices.
    """
    strategy = {"name": "pipeline", "microbatches": FILLING, "placer": placer}
    records, _ = searched(folder, strategy, trials=2, at_once=2 if at_once else 1)
    steps = [float(record.plan["measured_step_ms"]) / 1000 for record in records]
    return max(steps) if at_once else sum(steps)


def torch_pipelining() -> float:
    """Two processes of torch's own; the seconds of a step as the first one sees them."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **MEMORY_SETTINGS, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-m", "benchmarks.pipeline", "--rank"]
        others = [
            subprocess.Popen([*command, str(rank), folder], env=environment, stdout=subprocess.PIPE, text=True)
            for rank in (0, 1)
        ]
        said = [process.communicate()[0] for process in others]
        assert not any(process.returncode for process in others), said
    return float(said[0].split()[-1])


def rank(index: int, folder: str) -> None:
    """One of torch's two stages: the same layers that the balanced placement puts there."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=index, world_size=2)
    layers = list(network())
    half = LAYERS // 2
    own = nn.Sequential(*(layers[half:] if index else layers[:half]))
    optimizer = torch.optim.SGD(own.parameters(), lr=1e-3)
    stage = PipelineStage(own, index, 2, torch.device("cpu"))  # type: ignore[no-untyped-call]
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.cross_entropy)
    inputs, targets = data(BATCHES)
    order = torch.randperm(len(inputs))
    seconds = []
    for start in range(0, len(inputs), BATCH):
        dist.barrier()
        clock = time.perf_counter()
        rows = order[start : start + BATCH]
        losses: list[torch.Tensor] = []
        if index:
            schedule.step(target=targets[rows], losses=losses)
        else:
            schedule.step(inputs[rows])
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        seconds.append(time.perf_counter() - clock)
    print(statistics.median(seconds[1:]))
    dist.destroy_process_group()


def main() -> None:
    if "--rank" in sys.argv:
        rank(int(sys.argv[2]), sys.argv[3])
        return
    options = arguments(__doc__ or "")
    rounds = options.rounds or (1 if options.quick else 5)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        pipelined(folder)  # its profile is kept for the others
        systems: dict[str, Callable[[], float]] = {
            "pipeline": lambda: pipelined(folder),
            "torch": torch_pipelining,
            "one device": lambda: one_device(folder),
            "two at once": lambda: two_trials(folder, at_once=True),
            "one after the other": lambda: two_trials(folder, at_once=False),
            "one after the other, best stages": lambda: two_trials(folder, at_once=False, placer="best"),
        }
        seconds = interleaved(systems, rounds)
    figures = {
        "vs_torch_pipelining": ratios(seconds["torch"], seconds["pipeline"]),
        "speedup_vs_one_device": ratios(seconds["one device"], seconds["pipeline"]),
        "bubble_fill_speedup": ratios(seconds["one after the other"], seconds["two at once"]),
        "bubble_fill_vs_best_alone": ratios(seconds["one after the other, best stages"], seconds["two at once"]),
    }
    rows = [(name, spread(values)) for name, values in figures.items()]
    rows += [(f"seconds, {name}", spread(values)) for name, values in seconds.items()]
    finish(rows, {
        **{name: statistics.median(values) for name, values in figures.items()}, "microbatches": MICROBATCHES,
        "rows_a_microbatch": BATCH // MICROBATCHES, "rounds": rounds,
    })  # fmt: skip


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    main()
