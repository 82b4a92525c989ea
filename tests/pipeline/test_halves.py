"""A backward in two halves gives the gradients of one, and gives first what another device waits for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hydra_tune.graph.capture import capture
from hydra_tune.pipeline.halves import Halves
from tests.pipeline.test_exactness import check_net


class Net(nn.Module):
    """Layers behind each other, one of them followed by an activation in place, and one apart from what comes in."""

    def __init__(self, aside: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)
        self.aside = aside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu_(self.first(x))
        return self.second(self.norm(hidden)) + self.aside(torch.ones(1, 6, dtype=x.dtype))


def layers_of(model: nn.Module, rows: torch.Tensor) -> tuple[dict[int, list[nn.Parameter]], Any]:
    captured = capture(model, rows, [rows])
    named = dict(model.named_parameters())
    found = {node.layer: [named[n] for n in node.parameters] for node in captured.nodes if node.layer is not None}
    return found, captured.program


@pytest.mark.parametrize("frozen", [False, True])
def test_the_halves_add_up_to_the_whole(frozen: bool) -> None:
    torch.manual_seed(0)
    model = Net(nn.Linear(6, 3)).double()
    model.second.bias.requires_grad_(not frozen)
    rows = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    layers, program = layers_of(model, rows.detach())
    assert len(layers) == 3
    model(rows).square().mean().backward()
    whole = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    wanted = rows.grad
    assert wanted is not None
    model.zero_grad()
    rows.grad = None

    halves = Halves(layers)
    values = {0: rows}
    program.run_some(model, values, range(len(program)), program.results, training=True, made=halves.watch)
    halves.first([program.outputs(values).square().mean()], [None], [rows], model.parameters())
    assert rows.grad is not None
    torch.testing.assert_close(rows.grad, wanted, rtol=0, atol=1e-12)
    assert model.first.weight.grad is None, "it waits"
    assert model.second.weight.grad is None
    assert model.norm.weight.grad is not None, "this one does not"
    assert model.aside.weight.grad is not None, "nothing that came in goes through it"
    halves.second()
    for name, parameter in model.named_parameters():
        if whole[name] is None:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, whole[name], rtol=0, atol=1e-12, msg=name)


def test_layers_that_share_weights_or_are_made_of_others_do_not_wait() -> None:
    model = Net(nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3)))
    tied = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    tied[2].weight = tied[0].weight
    assert len(layers_of(model, torch.randn(4, 6))[0]) == 4
    assert [len(weights) for weights in layers_of(tied, torch.randn(4, 4))[0].values()] == [2]

    class Own(nn.Linear):
        """What it does with its weights is the user's business."""

    assert not layers_of(nn.Sequential(Own(4, 4)), torch.randn(4, 4))[0]


def test_the_last_micro_batch_of_every_step_but_the_first_is_in_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step it is measured what there is room for."""
    seconds: list[Halves] = []
    plain = Halves.second
    monkeypatch.setattr(Halves, "second", lambda self: (seconds.append(self), plain(self)))
    run, trial = check_net("mlp", tmp_path, microbatches=2, placer="balanced")
    kinds = [kind for kind, worker in run.ran if worker == 2 and kind in ("forward", "weights", "step")]
    batch = ["forward", "forward", "weights", "step"]
    steps = kinds.count("step")
    assert kinds == batch * steps
    assert len(seconds) == steps - 1
    assert trial.staged.stages[-1].layers


def test_without_room_for_what_waits_there_are_no_halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[Halves] = []
    monkeypatch.setattr(Halves, "second", seconds.append)
    monkeypatch.setattr(Halves, "bytes", property(lambda self: 1 << 40, lambda self, value: None), raising=False)
    check_net("mlp", tmp_path, microbatches=2, placer="balanced")
    assert not seconds
