"""One model on two CPU devices of one core each: against one device, against torch's own pipeline, and two at once.

All train the same network on the same batches, the pipelines in the same micro-batches. `torch` is
torch.distributed.pipelining with Schedule1F1B between two processes over gloo, cut at the same layer. A step is
measured from the batch to the end of the optimizer's step. The load of a shared machine changes from minute to minute,
so all take turns, each in its own processes that sleep meanwhile: one device, torch and the pipeline step by step,
where a round's figure is the median ratio of neighbouring steps; two trials, at once and one after the other, twenty
steps at a time, since the last step of a turn, which a search has only once, runs alone.

`two_devices_vs_one` is the gain of two cores for two independent trials: less than two on a shared machine, and no
pipeline can exceed its share of that.
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import hydra_tune as ht
from benchmarks.players import Gate, Player, wait_for_turn
from benchmarks.report import arguments, finish, interleaved, ratios, spread

WIDTH, LAYERS, BATCH, BATCHES, MICROBATCHES = 768, 8, 4096, 10, 8
FILLING = 4
"""Micro-batches when two trials run at once: more gaps to fill."""
A_TURN = 2 * BATCHES
"""Steps per turn of each of two trials."""
WARM = 2
"""Warm-up steps of a player that do not count: the first steps allocate memory and measure."""
MODULE = "benchmarks.pipeline"


def network() -> nn.Sequential:
    """Return layers of one size; the last one is small, so that halves are as even as possible."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def data(batches: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(BATCH * batches, WIDTH, generator=generator)
    return inputs, torch.randint(0, 10, (BATCH * batches,), generator=generator)


def build(trial: Any, epochs: int = 1) -> ht.Candidate:
    lr = trial.suggest_float("lr", 1e-4, 1e-3)
    return ht.Candidate(
        model=network(), loss=nn.functional.cross_entropy, optimizer=functools.partial(torch.optim.SGD, lr=lr),
        train=TensorDataset(*data(BATCHES)), batch_size=BATCH, epochs=epochs,
    )  # fmt: skip


def searched(folder: str, strategy: Any, trials: int = 1, epochs: int = 1) -> None:
    """Run a search of `trials` trials, all at once."""
    result = ht.search(
        functools.partial(build, epochs=epochs), trials=trials, devices="2xcpu", concurrency=trials, sampler="random",
        seed=1, storage=f"sqlite:///{folder}/pipeline.db", study=f"run-{time.time_ns()}", progress=False,
        checkpoint_seconds=3600, strategy=strategy,
    )  # fmt: skip
    assert result.completed == trials
    result.close()


def play_search(name: str, placer: str, microbatches: int, trials: int, epochs: int, folder: str) -> None:
    """Play a search whose every batch waits for its turn."""
    from hydra_tune.strategies.pipeline.batch import Batch
    from hydra_tune.strategies.pipeline.strategy import InStages
    from hydra_tune.strategies.whole import strategy as whole

    whole.SLICE_SECONDS = 0.0
    if name == "1f1b":
        name, Batch._in_halves = "pipeline", lambda *_: False  # type: ignore[method-assign]
    gate = Gate()
    gate.guard(InStages, "_train_batch")
    gate.guard(whole.OnOneDevice, "train")
    staged = {"name": name, "microbatches": microbatches, "placer": placer}
    searched(folder, staged if name == "pipeline" else name, trials, epochs)


def player(
    folder: str, name: str, placer: str = "best", microbatches: int = MICROBATCHES, trials: int = 1, epochs: int = 1
) -> Player:
    return Player(MODULE, ["--search", name, placer, str(microbatches), str(trials), str(epochs), folder])


def single_steps(folder: str) -> dict[str, list[float]]:
    """Return the step times of one device, of two at once, of torch and of the pipeline, taken in turns."""
    place = str(Path(folder).resolve())
    alone = {
        "one device": player(folder, "whole"),
        "torch": Player(MODULE, ["--rank", "0", place], ["--rank", "1", place]),
        "pipeline": player(folder, "pipeline"),
    }
    both = [player(folder, "whole") for _ in range(2)]
    seconds: dict[str, list[float]] = {name: [] for name in (*alone, "two devices")}
    for batch in range(BATCHES - 1):  # the end of a search is outside all turns
        for name in seconds if batch % 2 else reversed(seconds):
            if name in alone:
                seconds[name].append(alone[name].turn())
                continue
            for each in both:
                each.begin()
            seconds[name].append(max([each.end() for each in both]))
    for each in (*alone.values(), *both):
        each.finish()
    Path(folder, "store").unlink(missing_ok=True)
    return {name: found[WARM:] for name, found in seconds.items()}


def two_trials(folder: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds for some steps of each of two trials: at once, and one after the other.

    All have the same stages. If the last micro-batch goes back in halves, a single trial has fewer gaps to fill than in
    plain 1F1B; two such trials one after the other take twice the time of one.
    """
    turns = A_TURN // BATCHES  # in epochs
    pair = player(folder, "pipeline", "balanced", FILLING, trials=2, epochs=turns * (1 + 2 * rounds) + 1)
    plain = player(folder, "1f1b", "balanced", FILLING, epochs=turns * (1 + rounds) + 1)
    systems = {
        "two at once": lambda: pair.turn([0, 1], A_TURN),
        "one after the other": lambda: pair.turn([0], A_TURN) + pair.turn([1], A_TURN),
        "one after the other, plain 1F1B": lambda: 2 * plain.turn([0], A_TURN),
    }
    pair.turn([0, 1], A_TURN)
    plain.turn([0], A_TURN)
    seconds = interleaved(systems, rounds)
    pair.finish()
    plain.finish()
    return seconds


def rank(index: int, folder: str) -> None:
    """Run one of torch's two stages, with the layers that the balanced placement puts there."""
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
        name, placer, microbatches, trials, epochs, folder = sys.argv[2:]
        play_search(name, placer, int(microbatches), int(trials), int(epochs), folder)
        return
    options = arguments(__doc__ or "")
    rounds = options.rounds or (1 if options.quick else 5)
    steps: dict[str, list[list[float]]] = {}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        # Profiles of these runs are kept for the others.
        searched(folder, {"name": "pipeline", "microbatches": MICROBATCHES})
        searched(folder, {"name": "pipeline", "microbatches": FILLING})
        for round_ in range(rounds):
            for name, found in single_steps(folder).items():
                steps.setdefault(name, []).append(found)
                said = f"round {round_ + 1}/{rounds}: {name} {statistics.median(found):.3f}"
                print(said, file=sys.stderr, flush=True)
        seconds = two_trials(folder, rounds)
    _report(seconds, steps)


def _report(seconds: dict[str, list[float]], steps: dict[str, list[list[float]]]) -> None:
    def neighbours(slow: str, fast: str) -> list[float]:
        """Return the median ratio of neighbouring steps for each round."""
        pairs = zip(steps[slow], steps[fast], strict=True)
        return [statistics.median(ratios(a, b)) for a, b in pairs]

    figures = {
        "vs_torch_pipelining": neighbours("torch", "pipeline"),
        "speedup_vs_one_device": neighbours("one device", "pipeline"),
        "torch_vs_one_device": neighbours("one device", "torch"),
        "two_devices_vs_one": [2 * ratio for ratio in neighbours("one device", "two devices")],
        "bubble_fill_speedup": ratios(seconds["one after the other"], seconds["two at once"]),
        "bubble_fill_vs_plain_1f1b": ratios(seconds["one after the other, plain 1F1B"], seconds["two at once"]),
    }
    rows = [(name, spread(values)) for name, values in figures.items()]
    rows += [(f"seconds, {name}", spread([statistics.median(each) for each in found])) for name, found in steps.items()]
    rows += [(f"seconds, {name}", spread([each / A_TURN for each in values])) for name, values in seconds.items()]
    finish(rows, {
        **{name: statistics.median(values) for name, values in figures.items()}, "microbatches": MICROBATCHES,
        "rows_a_microbatch": BATCH // MICROBATCHES, "rounds": len(steps["torch"]), "steps_a_round": BATCHES - 1 - WARM,
    })  # fmt: skip


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))
    main()
