"""A backward in two halves gives the gradients of one, those that another device waits for first."""

from __future__ import annotations

import asyncio
import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hydra_tune.strategies.pipeline.part as part
import hydra_tune.strategies.pipeline.prepare as layouts
from hydra_tune.engine.jobs import Load
from hydra_tune.graph.capture import capture
from hydra_tune.strategies.pipeline.halves import Halves, is_plain
from hydra_tune.strategies.pipeline.strategy import Pipeline
from tests.strategies.pipeline.here import Here, train
from tests.strategies.pipeline.test_exactness import check_net, in_turn, net, pipelined
from tests.strategies.shard.models import assert_same, candidate, finish, start


class Dense(nn.Module):
    """Layers behind each other, one followed by an activation in place, and one apart from what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)
        self.aside = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu_(self.first(x))
        return self.second(self.norm(hidden)) + self.aside(torch.ones(1, 6, dtype=x.dtype))


class Sequences(nn.Module):
    """Dense layers on three dimensions, whose outputs are views in torch, changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu_(self.first(x.view(-1, 3, 2)))).mean(1)


class Borrowing(nn.Module):
    """Uses the weights of another layer too, where nobody sees it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.lender = [layer]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.lender[0].weight


def borrowing() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), Borrowing(layer), nn.Linear(6, 3))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 3, bias=False))
    model[2].weight = model[0].weight
    return model


def images() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 2, padding=1), nn.ReLU(), nn.Unflatten(2, (2, 2)),
        nn.Conv2d(4, 6, 2, groups=2, bias=False), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip


NETS: dict[str, tuple[Any, int]] = {
    "dense": (Dense, 3),
    "borrowing": (borrowing, 2),
    "tied": (tied, 3),
    "images": (images, 3),
    "sequences": (Sequences, 2),
}
"""Nets, and how many of their layers can wait."""


def halves_of(model: nn.Module, rows: torch.Tensor) -> tuple[Halves, Any]:
    captured = capture(model, rows, [rows])
    ops = captured.program.training
    layers = [node.layer for node in captured.nodes if node.layer is not None]
    return Halves({op: model.get_submodule(str(ops[op].target)) for op in layers}, waits=True), captured.program


@pytest.mark.parametrize("name", sorted(NETS))
@pytest.mark.parametrize("frozen", [False, True])
def test_the_halves_add_up_to_the_whole(name: str, frozen: bool) -> None:
    torch.manual_seed(0)
    make, count = NETS[name]
    model: nn.Module = make().double()
    if frozen:
        next(p for n, p in model.named_parameters() if n.endswith("bias")).requires_grad_(False)
    rows = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    halves, program = halves_of(model, rows.detach())
    assert len(halves.instead) == count
    model(rows).square().mean().backward()
    wanted, rows.grad = rows.grad, None
    whole = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()

    values = {0: rows}
    program.run_some(model, values, range(len(program)), program.results, training=True, instead=halves.instead)
    program.outputs(values).square().mean().backward()
    torch.testing.assert_close(rows.grad, wanted, rtol=0, atol=1e-12)
    assert any(p.grad is None for p in model.parameters() if p.requires_grad), "some wait"
    halves.second()
    for n, parameter in model.named_parameters():
        if whole[n] is None:
            assert parameter.grad is None, n
        else:
            torch.testing.assert_close(parameter.grad, whole[n], rtol=0, atol=1e-12, msg=n)


def test_gradients_that_come_later_are_seen_by_whoever_watches_their_weights() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    seen: list[int] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(id(p)))
    halves, program = halves_of(model, torch.randn(4, 6))
    values = {0: torch.randn(4, 6, requires_grad=True)}
    program.run_some(model, values, range(2), program.results, training=True, instead=halves.instead)
    program.outputs(values).sum().backward()
    assert not seen
    halves.second()
    assert sorted(seen) == sorted(id(p) for p in model.parameters())


def test_layers_with_hooks_or_other_paddings_do_not_wait() -> None:
    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    assert is_plain(nn.Linear(2, 2))
    assert is_plain(nn.Conv1d(2, 2, 3, padding=1))
    assert not is_plain(hooked)
    assert not is_plain(nn.Conv1d(2, 2, 3, padding="same"))
    assert not is_plain(nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular"))

    class Own(nn.Linear):
        """What it does with its weights is the user's business."""

    assert not halves_of(nn.Sequential(Own(4, 4)), torch.randn(4, 4))[0].instead


def watched(monkeypatch: pytest.MonkeyPatch, kept: int) -> list[bool]:
    """Fills up with whether layers wait, each time that some could; they keep so many bytes by their own account."""
    waiting: list[bool] = []

    class Watched(Halves):
        def __init__(self, layers: Any, *, waits: bool) -> None:
            super().__init__(layers, waits=waits)
            if layers:
                waiting.append(waits)
                self.bytes = kept

    monkeypatch.setattr(part, "Halves", Watched)
    return waiting


@pytest.mark.parametrize("roomy", [True, False])
def test_the_last_micro_batch_of_a_step_is_in_halves_once_it_is_known_what_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, roomy: bool
) -> None:
    waiting = watched(monkeypatch, 0 if roomy else 1 << 40)
    run, trial = check_net("mlp", tmp_path, microbatches=2, placer="balanced")
    kinds = [kind for kind, worker in run.ran if worker == 2 and kind in ("forward", "weights", "step")]
    steps = kinds.count("step")
    assert kinds == ["forward", "forward", "weights", "step"] * steps
    assert trial.staged.stages[-1].later
    measured = part.MEASURED_STEPS
    assert waiting == [False] * measured + [roomy] * (steps - measured)


def test_a_device_with_several_stages_goes_back_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_placed", in_turn)
    run, trial = check_net("inception", tmp_path, fields={"epochs": 1}, microbatches=2, placer="m-topo")
    on = [stage.device for stage in trial.staged.stages]
    assert all(on.count(stage.device) == 1 for stage in trial.staged.stages if stage.later)
    assert len(on) > 2
    assert len([kind for kind, _ in run.ran if kind == "weights"]) == sum(
        bool(stage.later) for stage in trial.staged.stages
    ) * len([kind for kind, worker in run.ran if kind == "step" and worker == 1])


def test_where_nobody_wants_a_gradient_nothing_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first device's part is frozen, so the second one's weights are all that there is to do."""
    made: list[int] = []

    class Watched(Halves):
        def __init__(self, layers: Any, *, waits: bool) -> None:
            super().__init__(layers, waits=waits)
            made.append(len(layers))

    monkeypatch.setattr(part, "Halves", Watched)
    fields = net("mlp")
    for parameter in list(fields["model"].parameters())[:-2]:
        parameter.requires_grad_(False)
    plain = finish(start(candidate(**copy.deepcopy(fields))))
    run, _ = pipelined(candidate(**fields), tmp_path, microbatches=2, placer="balanced")
    assert_same(run.state(), plain.state())
    assert not any(made)


def test_where_other_trials_fill_the_gap_nothing_goes_back_in_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the first batch without them only shows what would be kept, as the first steps do else."""
    waiting = watched(monkeypatch, 0)
    run = Here(candidate(**net("mlp")), tmp_path, 2)
    company = itertools.chain([1] * (part.MEASURED_STEPS + 1), itertools.repeat(0))
    run.engine.load = lambda _attempt: Load(idle=0, waiting=0, others=next(company))  # type: ignore[method-assign]
    trial = asyncio.run(train(run, Pipeline(microbatches=2, placer="balanced")))
    assert trial.staged.stages[-1].later
    kinds = [kind for kind, worker in run.ran if worker == 2 and kind in ("forward", "weights", "step")]
    first, steps = part.MEASURED_STEPS + 1, kinds.count("step")
    assert kinds == ["forward", "forward", "step"] * first + ["forward", "forward", "weights", "step"] * (steps - first)
    assert waiting == [False] + [True] * (steps - first - 1)
    assert {(0, 0), (0, 1)} == run.ranks["forward"]
    assert len(waiting) > 1
    assert_same(run.state(), finish(start(candidate(**net("mlp")))).state())
