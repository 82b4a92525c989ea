"""A pipelined trial is the plain loop, in float64 to 1e-9: metrics, weights, optimizer state, buffers and streams."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hydra_tune as ht
from hydra_tune.engine.unit import Failure, TrialEnded, UnitFailed, UnitResult
from hydra_tune.strategies.pipeline import prepare as layouts
from hydra_tune.strategies.pipeline.prepare import most_on_a_device
from hydra_tune.strategies.pipeline.strategy import InStages, Pipeline
from hydra_tune.strategies.shard import prepare
from tests.strategies.pipeline.here import Here, train
from tests.strategies.shard.models import CLASSES, MODELS, assert_same, candidate, finish, start
from tests.strategies.shard.test_exactness import OPTIMIZERS, SCHEDULES


def pipelined(made: ht.Candidate, folder: Path, devices: int = 2, **options: Any) -> tuple[Here, InStages]:
    run = Here(made, folder, devices)
    return run, asyncio.run(train(run, Pipeline(**options)))


def check(fields: dict[str, Any], folder: Path, devices: int = 2, **options: Any) -> tuple[Here, InStages]:
    """Train both ways, and compare all that a checkpoint holds."""
    plain = finish(start(candidate(**fields)))
    run, trial = pipelined(candidate(**fields), folder, devices, **options)
    assert_same(trial.history, plain.history)
    assert_same(run.state(), plain.state())
    return run, trial


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_one_microbatch_gives_the_plain_loop_whatever_the_model(kind: str, tmp_path: Path) -> None:
    _, trial = check({"kind": kind, "depth": 3}, tmp_path, microbatches=1, placer="balanced")
    if kind not in ("half trained",):
        assert {stage.device for stage in trial.staged.stages} == {0, 1}


class Normed(nn.Module):
    """A residual net with LayerNorm or GroupNorm."""

    def __init__(self, group: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        norm = (lambda: nn.GroupNorm(2, 8)) if group else (lambda: nn.LayerNorm(8))
        self.blocks = nn.ModuleList(
            nn.Sequential(norm(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(4)
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Inception(nn.Module):
    """Branches of unlike depth that start from one value and are concatenated, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.first = nn.ModuleList(self._branch(8, depth) for depth in (1, 2, 3))
        self.second = nn.ModuleList(self._branch(24, depth) for depth in (3, 1))
        self.head = nn.Linear(16, CLASSES)

    @staticmethod
    def _branch(width: int, depth: int) -> nn.Sequential:
        layers: list[nn.Module] = [nn.Linear(width, 8), nn.Tanh()]
        for _ in range(depth - 1):
            layers += [nn.Linear(8, 8), nn.Tanh()]
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        x = torch.cat([branch(x) for branch in self.first], 1)
        x = torch.cat([branch(x) for branch in self.second], 1)
        return self.head(x)


class ConvResNet(nn.Module):
    """A residual net of convolutions with GroupNorm; a row of six numbers is an image of two by three."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)) for _ in range(3)
        )
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.unflatten(1, (1, 2, 3)))
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


class ConvInception(nn.Module):
    """Convolutions of three sizes beside each other, and a pooling branch, concatenated as channels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.branches = nn.ModuleList([
            nn.Conv2d(4, 3, 1),
            nn.Sequential(nn.Conv2d(4, 3, 1), nn.ReLU(), nn.Conv2d(3, 3, 3, padding=1)),
            nn.Sequential(nn.Conv2d(4, 3, 1), nn.ReLU(), nn.Conv2d(3, 3, 5, padding=2)),
            nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(4, 3, 1)),
        ])  # fmt: skip
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x.unflatten(1, (1, 2, 3))))
        x = torch.cat([branch(x) for branch in self.branches], 1)
        return self.head(x.mean((2, 3)))


class TiedGPT(nn.Module):
    """A small causal GPT whose output layer is its embedding; rows are sequences of numbers made of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 8)
        self.position = nn.Embedding(6, 8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True) for _ in range(3)
        )
        self.norm = nn.LayerNorm(8)
        self.register_buffer("later", torch.full((6, 6), -torch.inf).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x > 0).long() + (x > 0.4).long()
        h = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            h = block(h, src_mask=self.later)
        return F.linear(self.norm(h).mean(1), self.embedding.weight)


NETS: dict[str, Any] = {
    "mlp": lambda: nn.Sequential(*(layer for i in range(4) for layer in (nn.Linear(6 if not i else 8, 8), nn.ReLU())),
                                 nn.Linear(8, CLASSES)),
    "layer norm": lambda: Normed(group=False),
    "group norm": lambda: Normed(group=True),
    "inception": Inception,
    "convolutions": ConvResNet,
    "convolutional inception": ConvInception,
    "tied gpt": TiedGPT,
}  # fmt: skip


def net(name: str, **fields: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    return {"model": NETS[name]().double(), **fields}


def check_net(name: str, folder: Path, devices: int = 2, fields: Any = None, **options: Any) -> tuple[Here, InStages]:
    plain = finish(start(candidate(**net(name, **(fields or {})))))
    run, trial = pipelined(candidate(**net(name, **(fields or {}))), folder, devices, **options)
    assert_same(trial.history, plain.history)
    assert_same(run.state(), plain.state())
    return run, trial


@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
@pytest.mark.parametrize("name", sorted(NETS))
def test_microbatches_give_the_step_of_the_whole_batch(name: str, order: str, tmp_path: Path) -> None:
    _, trial = check_net(name, tmp_path, microbatches=3, placer="balanced", order=order)
    assert trial.staged.microbatches == 3
    assert {stage.device for stage in trial.staged.stages} == {0, 1}


@pytest.mark.parametrize("placer", ["best", "m-topo", "m-etf", "m-sct", "fused"])
@pytest.mark.parametrize("name", sorted(NETS))
def test_whoever_places_the_result_is_the_same(name: str, placer: str, tmp_path: Path) -> None:
    check_net(name, tmp_path, devices=3, fields={"epochs": 1}, microbatches=2, placer=placer)


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_every_optimizer_and_clipping_by_the_norm_of_all_devices(optimizer: str, tmp_path: Path) -> None:
    fields = {"optimizer": OPTIMIZERS[optimizer], "clip_grad_norm": 0.3}
    check_net("layer norm", tmp_path, fields=fields, microbatches=2, placer="balanced")


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_every_schedule_and_accumulation(schedule: str, tmp_path: Path) -> None:
    factory, every = SCHEDULES[schedule]
    fields = {"scheduler": factory, "schedule_every": every, "accumulate": 2}
    check_net("mlp", tmp_path, fields=fields, microbatches=2, placer="balanced")


def in_turn(_prospect: Any, atoms: Any, capacity: Any, *_rest: Any) -> list[int]:
    """Atoms go to devices in turn, so that each has several stages."""
    return [index % len(capacity) for index in range(len(atoms))]


def test_branches_run_on_different_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_placed", in_turn)
    _, trial = check_net("inception", tmp_path, fields={"epochs": 1}, microbatches=2, placer="m-topo")
    assert len(trial.staged.stages) > 2


def test_where_it_does_not_fit_in_one_order_of_the_devices_it_goes_the_other_way(tmp_path: Path) -> None:
    """The first layer has most of the weights, and the devices are not alike."""

    class Uneven(Here):
        def room(self) -> list[int]:
            return [215_000, 110_000]

        async def unit(self, kind: str, work: Any, *args: Any, **options: Any) -> UnitResult:
            try:
                return await super().unit(kind, work, *args, **options)
            except TrialEnded as error:
                raise UnitFailed(Failure.of(error)) from error

    def laid_out(ways: list[range]) -> InStages:
        model = nn.Sequential(nn.Linear(6, 512), nn.ReLU(), nn.Linear(512, 3)).double()
        run = Uneven(candidate("mlp", model=model), tmp_path, 2)
        return asyncio.run(InStages.laid_out(run, Pipeline(placer="balanced", microbatches=2), ways))

    with pytest.raises(UnitFailed, match="lack"):
        laid_out([range(2)[::-1]])
    assert laid_out([range(2)[::-1], range(2)]).devices == range(2)


def test_units_know_their_rank_and_pilots_have_company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first, forwards go before backwards, whoever's; by the second, a step is predicted for busy cores."""
    beside: list[int] = []
    monkeypatch.setattr(prepare, "company", lambda others: beside.append(others) or nullcontext(True))
    run, _ = pipelined(candidate(**net("mlp", epochs=1)), tmp_path, devices=3, microbatches=2, placer="balanced")
    assert 2 in beside
    ranks = {kind: run.ranks[kind] for kind in ("forward", "backward", "weights", "step", "evaluate")}
    assert ranks == {
        "forward": {(0, 0), (0, 1)}, "backward": {(1, 0), (1, 1)}, "weights": {(2, 1)}, "step": {None},
        "evaluate": {(1, 0)},
    }  # fmt: skip


def test_what_is_handed_over_counts_for_the_host_and_a_device_holds_what_was_planned(tmp_path: Path) -> None:
    """A wide boundary in many micro-batches: there is a place for each on the host, and few are in flight."""
    width = 512
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Tanh(), nn.Tanh(), nn.Linear(width, 3)).double()
    made = candidate("mlp", model=model, count=200, batch_size=80)
    run, trial = pipelined(made, tmp_path, microbatches=8, placer="balanced")
    stages = trial.staged.stages
    assert {stage.device for stage in stages} == {0, 1}
    assert 0 < run.peak <= most_on_a_device(stages, 2, "1f1b", trial.staged.microbatches)


class SlowStep(Here):
    """The last device makes its steps late."""

    async def unit(self, kind: str, work: Any, *args: Any, worker: int | None = None, **rest: Any) -> UnitResult:
        if kind == "step" and worker == 2:
            for _ in range(50):
                await asyncio.sleep(0)
        return await super().unit(kind, work, *args, worker=worker, **rest)


def test_a_batch_begins_on_each_device_after_the_step_of_that_device_only(tmp_path: Path) -> None:
    plain = finish(start(candidate(**net("mlp", epochs=1))))
    run = SlowStep(candidate(**net("mlp", epochs=1)), tmp_path, 2)
    asyncio.run(train(run, Pipeline(microbatches=2, placer="balanced")))
    assert_same(run.state(), plain.state())
    ahead = []
    for worker in (1, 2):
        kinds = [kind for kind, where in run.ran if where == worker and kind in ("forward", "step")]
        assert kinds == ["forward", "forward", "step"] * kinds.count("step")
    for index, (kind, worker) in enumerate(run.ran):
        if kind == "step" and worker == 2:
            ahead.append(run.ran[index - 1] == ("forward", 1))
    assert any(ahead), "the first device went on with the next batch meanwhile"
