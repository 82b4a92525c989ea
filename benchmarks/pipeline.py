"""One model on two CPU devices of one core each: against one device, against torch's own pipeline, and two at once.

All train the same network on the same batches in the same micro-batches. `torch` is torch.distributed.pipelining with
Schedule1F1B between two processes over gloo, cut at the same layer. A step is measured from the batch to the end of
the optimizer's step. What neighbours do to the machine changes from one minute to the next, so one device, torch and
the pipeline take turns step by step, each in processes of its own that sleep meanwhile; a round's figure is the median
of the ratios of neighbouring steps. Two trials at once are measured in runs of their own, of which the median step
counts.
"""

from __future__ import annotations

import asyncio
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
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


def searched(folder: str, strategy: Any, trials: int = 1, at_once: int = 1) -> Any:
    """The trials of a search."""
    url = f"sqlite:///{folder}/pipeline.db"
    result = ht.search(
        build, trials=trials, devices="2xcpu", concurrency=at_once, sampler="random", seed=1, storage=url,
        progress=False, checkpoint_seconds=3600, study=f"run-{time.time_ns()}", strategy=strategy,
    )  # fmt: skip
    assert result.completed == trials
    records = result.trials
    result.close()
    return records


class Player:
    """A system in processes of its own, which makes a step when it is told to."""

    def __init__(self, *commands: Sequence[str]) -> None:
        environment = {**os.environ, **MEMORY_SETTINGS, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.pipeline", *command], env=environment, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, text=True,
            )
            for command in commands
        ]  # fmt: skip

    def step(self) -> float:
        """The seconds of the next step; only the first process says them."""
        first = self._processes[0]
        assert first.stdin is not None
        assert first.stdout is not None
        print(file=first.stdin, flush=True)
        return float(first.stdout.readline())

    def finish(self) -> None:
        for process in self._processes:
            process.communicate()
            assert process.returncode == 0


def wait_for_turn() -> None:
    """In a player: sleep until the next step is asked for."""
    sys.stdin.readline()


def in_turns(folder: str) -> dict[str, list[float]]:
    """The steps of one device, torch and the pipeline, taken in turns; of the first, nobody is warm yet."""
    players = {
        "one device": Player(["--search", "whole", folder]),
        "torch": Player(["--rank", "0", str(Path(folder).resolve())], ["--rank", "1", str(Path(folder).resolve())]),
        "pipeline": Player(["--search", "pipeline", folder]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in players}
    for batch in range(BATCHES):
        for name in players if batch % 2 else reversed(players):
            seconds[name].append(players[name].step())
    for player in players.values():
        player.finish()
    Path(folder, "store").unlink(missing_ok=True)
    return {name: found[1:] for name, found in seconds.items()}


def play_search(name: str, folder: str) -> None:
    """A player: a search of one trial, whose every batch waits for its turn."""
    from hydra_tune.strategies import whole
    from hydra_tune.strategies.pipeline import InStages

    whole.SLICE_SECONDS = 0.0
    kind: Any = InStages if name == "pipeline" else whole.OnOneDevice
    method = "_train_batch" if name == "pipeline" else "train"
    plain = getattr(kind, method)

    async def in_turn(self: Any, remaining: float | None) -> Any:
        await asyncio.to_thread(wait_for_turn)
        clock = time.perf_counter()
        done = await plain(self, remaining)
        print(time.perf_counter() - clock, flush=True)
        return done

    setattr(kind, method, in_turn)
    searched(folder, {"name": name, "microbatches": MICROBATCHES} if name == "pipeline" else name)


def two_trials(folder: str, *, at_once: bool, placer: str = "balanced") -> float:
    """Seconds for a step of each of two trials: at once they overlap, else they follow each other.

    Of each trial the median step counts: the second one starts some steps after the first, which is then alone. Both
    ways have the same stages; by itself a trial would get others, which leave no gaps on one of the devices.
    """
    strategy = {"name": "pipeline", "microbatches": FILLING, "placer": placer}
    records = searched(folder, strategy, trials=2, at_once=2 if at_once else 1)
    steps = [float(record.plan["measured_step_ms"]) / 1000 for record in records]
    return max(steps) if at_once else sum(steps)


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
    for start in range(0, len(inputs), BATCH):
        if not index:
            wait_for_turn()
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
        if not index:
            print(time.perf_counter() - clock, flush=True)
    dist.destroy_process_group()


def main() -> None:
    if "--rank" in sys.argv:
        rank(int(sys.argv[2]), sys.argv[3])
        return
    if "--search" in sys.argv:
        play_search(sys.argv[2], sys.argv[3])
        return
    options = arguments(__doc__ or "")
    rounds = options.rounds or (1 if options.quick else 5)
    steps: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        searched(folder, {"name": "pipeline", "microbatches": MICROBATCHES})  # its profile is kept for the others

        def turns() -> float:
            for name, found in in_turns(folder).items():
                steps.setdefault(name, []).append(found)
            return statistics.median(steps["pipeline"][-1])

        systems: dict[str, Callable[[], float]] = {
            "pipeline": turns,
            "two at once": lambda: two_trials(folder, at_once=True),
            "one after the other": lambda: two_trials(folder, at_once=False),
            "one after the other, best stages": lambda: two_trials(folder, at_once=False, placer="best"),
        }
        seconds = interleaved(systems, rounds)
    _report(seconds, steps)


def _report(seconds: dict[str, list[float]], steps: dict[str, list[list[float]]]) -> None:
    def neighbours(slow: str, fast: str) -> list[float]:
        """For each round, the median ratio of steps beside each other."""
        pairs = zip(steps[slow], steps[fast], strict=True)
        return [statistics.median(ratios(a, b)) for a, b in pairs]

    figures = {
        "vs_torch_pipelining": neighbours("torch", "pipeline"),
        "speedup_vs_one_device": neighbours("one device", "pipeline"),
        "torch_vs_one_device": neighbours("one device", "torch"),
        "bubble_fill_speedup": ratios(seconds["one after the other"], seconds["two at once"]),
        "bubble_fill_vs_best_alone": ratios(seconds["one after the other, best stages"], seconds["two at once"]),
    }
    rows = [(name, spread(values)) for name, values in figures.items()]
    rows += [(f"seconds, {name}", spread([statistics.median(each) for each in found])) for name, found in steps.items()]
    rows += [(f"seconds, {name}", spread(values)) for name, values in seconds.items() if name != "pipeline"]
    finish(rows, {
        **{name: statistics.median(values) for name, values in figures.items()}, "microbatches": MICROBATCHES,
        "rows_a_microbatch": BATCH // MICROBATCHES, "rounds": len(steps["torch"]), "steps_a_round": BATCHES - 1,
    })  # fmt: skip


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    main()
