"""Hooks on weights, modules and tensors: in stages they do what they do in a plain loop, or the model is not cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import hydra_tune as ht
from hydra_tune.strategies.pipeline.strategy import InStages, Pipeline
from tests.strategies.pipeline.here import Here, train
from tests.strategies.shard.models import CLASSES, assert_same, candidate, finish, start


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(torch.tanh(self.a(x))))  # type: ignore[no-any-return]


class HooksATensor(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x))
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 0.1)
        return self.c(self.b(h))  # type: ignore[no-any-return]


def of_a_weight(model: Layers) -> None:
    model.b[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def after_accumulation(model: Layers) -> None:
    def clamp(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        weight.grad.clamp_(-1e-3, 1e-3)

    model.b[0].weight.register_post_accumulate_grad_hook(clamp)


def of_a_module(model: Layers) -> None:
    model.b.register_full_backward_hook(lambda _module, given, _gave: (given[0] * 0.1,))


def of_the_model(model: Layers) -> None:
    model.register_full_backward_pre_hook(lambda _module, gave: (gave[0] * 0.1,))


def made(model: Layers, set_hook: Callable[[Layers], None]) -> ht.Candidate:
    torch.manual_seed(1)
    for parameter in model.double().parameters():
        nn.init.normal_(parameter, std=0.3)
    set_hook(model)
    return candidate(model=model, metrics={})


def trained(make: Callable[[], ht.Candidate], folder: Path) -> tuple[Here, InStages]:
    plain = finish(start(make()))
    run = Here(make(), folder, 2, again=make)
    trial = asyncio.run(train(run, Pipeline(placer="balanced")))
    assert_same(run.state(), plain.state())
    return run, trial


@pytest.mark.parametrize("set_hook", [of_a_weight, after_accumulation, of_a_module])
def test_hooks_run_in_stages(set_hook: Callable[[Layers], None], tmp_path: Path) -> None:
    run, trial = trained(lambda: made(Layers(), set_hook), tmp_path)
    assert len({stage.device for stage in trial.staged.stages}) == 2
    if set_hook is not of_a_module:
        assert trial.staged.microbatches == 1
        assert any("has a hook, which would see the gradient of each micro-batch" in note for note in run.notes)


@pytest.mark.parametrize(
    ("model", "set_hook", "said"),
    [
        (Layers, of_the_model, "the model itself has backward hooks"),
        (HooksATensor, lambda _model: None, "it sets hooks on a tensor"),
    ],
)
def test_hooks_that_a_recording_would_lose_keep_the_model_whole(
    model: Callable[[], Layers], set_hook: Callable[[Layers], None], said: str, tmp_path: Path
) -> None:
    run, trial = trained(lambda: made(model(), set_hook), tmp_path)
    assert len(trial.staged.stages) == 1
    assert any(said in note for note in run.notes)


def test_a_candidate_that_cannot_be_built_again_is_refused(tmp_path: Path) -> None:
    run = Here(made(Layers(), of_a_weight), tmp_path, 2)
    with pytest.raises(ht.HydraTuneError, match=r"'b.0.weight' has a hook, which a copy would not have"):
        asyncio.run(train(run, Pipeline(placer="balanced")))
