"""Which stages a model gets: for one trial those of the shortest step, for several those that fill gaps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from hydra_tune.pipeline.prepare import LaidOut, lay_out
from hydra_tune.shards.prepare import Prospect, examine
from hydra_tune.training import Training
from tests.shards.models import CPU, SEED, candidate

LAYERS = 8


def even_chain(folder: Path) -> Prospect:
    """Layers of one second forward and two backward; the first hands no gradient on, the head is small."""
    layers = [nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(LAYERS)]
    made = candidate("mlp", model=nn.Sequential(*layers, nn.Linear(6, 3)).double())
    training = Training(made, made.train, made.valid, SEED, CPU)
    prospect = examine(training, folder)
    seconds = [(1.0, 1.0), *[(1.0, 2.0)] * (LAYERS - 1), (0.2, 0.2)]
    nodes = tuple(
        replace(node, forward_seconds=forward, backward_seconds=backward, step_seconds=0.0)
        for node, (forward, backward) in zip(prospect.profile.nodes, seconds, strict=True)
    )
    return replace(prospect, profile=replace(prospect.profile, nodes=nodes))


def laid_out(prospect: Prospect, trials: int) -> LaidOut:
    return lay_out(prospect, 2, [1 << 30] * 2, 4, "1f1b", "best", lambda size: 0.0, trials=trials)


def test_a_trial_alone_gets_the_shortest_step_and_two_at_once_even_devices(tmp_path: Path) -> None:
    torch.manual_seed(SEED)
    prospect = even_chain(tmp_path)
    alone, shared = laid_out(prospect, 1), laid_out(prospect, 2)
    assert alone.prediction.seconds < shared.prediction.seconds
    assert max(shared.prediction.busy) < max(alone.prediction.busy)
    assert shared.prediction.shared_seconds(2) < alone.prediction.shared_seconds(2)
    assert [len(stage.nodes) for stage in shared.stages] == [LAYERS // 2, LAYERS // 2 + 1]
