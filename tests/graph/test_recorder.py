"""Forwards written like those of real models are recorded inside, and run with batches of other sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_tune.core.errors import CandidateError
from hydra_tune.core.trees import call_model
from hydra_tune.graph.capture import capture

pytestmark = pytest.mark.smoke
WIDTH = 6


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(count))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class Length(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.second(h + torch.arange(len(x)).unsqueeze(1).expand(len(x), x.shape[1]))


class WithoutGradients(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.first(x).abs().mean(1, keepdim=True)
        return self.second(self.first(x) / scale)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 3  # not what autograd would do


class OwnBackward(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Doubled.apply(self.first(x)))


class Assigns(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        shifted = h.new_zeros(h.shape)
        shifted[:, 1:] = h[:, :-1].clone()
        shifted[:, 0] = torch.finfo(h.dtype).eps
        return self.second(shifted)


class LossMadeInside(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.MSELoss()(self.second(F.relu(self.first(x))), x)


class Cache:
    def __init__(self) -> None:
        self.layers: list[torch.Tensor] = []

    def add(self, value: torch.Tensor) -> torch.Tensor:
        self.layers.append(value)
        return torch.stack(self.layers).sum(0)


class KeepsACache(Two):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        cache = Cache()
        h = self.second(cache.add(self.first(cache.add(x))))
        return {"out": h, "cache": cache}


class SkipsAMask(Two):
    """Looks at contents, unless it is traced, for speed alone."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if torch.jit.is_tracing() or not mask.all():
            h = h * mask
        return self.second(h)


class ByPosition(Two):
    """Decides by the contents of a tensor that follow from sizes alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.second(h) if torch.arange(x.shape[1]).max() < 10 else h


@pytest.mark.parametrize(
    "kind", [Length, WithoutGradients, OwnBackward, Assigns, LossMadeInside, KeepsACache, ByPosition]
)
def test_it_is_recorded_inside_and_gives_the_gradients_of_the_model(kind: type[Two]) -> None:
    model = kind()
    captured = capture(model, rows(3), [rows(5), rows(2)])
    assert captured.whole_because == ""
    names = {name for node in captured.nodes for name in node.parameters}
    assert len(captured.nodes) >= 2
    assert names == dict(model.named_parameters()).keys()
    program = captured.program
    for count in (1, 4, 7):
        found: list[list[torch.Tensor]] = []
        for recorded in (True, False):
            model.zero_grad()
            values = dict(enumerate(program.bind(rows(count))))
            if recorded:
                program.run(model, values, 0, len(program), training=True)
            out = program.outputs(values) if recorded else call_model(model, rows(count))
            main = out["out"] if isinstance(out, dict) else out
            main.pow(2).sum().backward()
            found.append([main.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
            if isinstance(out, dict):
                assert type(out["cache"]) is Cache
                found[-1] += [each.detach() for each in out["cache"].layers]
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_shortcut_by_contents_is_not_taken_and_the_result_is_the_same_up_to_rounding() -> None:
    model = SkipsAMask()
    full, some = torch.ones(5, WIDTH), torch.ones(5, WIDTH).tril()
    captured = capture(model, (rows(5)[:3], full[:3]), [(rows(5), full), (rows(5), some)])
    assert [node.name for node in captured.nodes] == ["first", "second"]
    for mask in (full, some):
        values = dict(enumerate(captured.program.bind((rows(5), mask))))
        captured.program.run(model, values, 0, len(captured.program), training=True)
        torch.testing.assert_close(captured.program.outputs(values), model(rows(5), mask))


@dataclass
class Options:
    scale: float


class Decides(Two):
    def forward(self, x: torch.Tensor, times: int, options: Any = None, name: str = "a") -> torch.Tensor:
        h = self.first(x) * times * (options.scale if options else 1)
        return self.second(h) if x.shape[1] > times else h


def test_numbers_of_a_batch_are_values_and_decisions_by_them_are_checked() -> None:
    model = Decides()
    captured = capture(model, (rows(3), 2), [(rows(5), 4)])
    assert len(captured.nodes) == 2
    values = dict(enumerate(captured.program.bind((rows(4), 3))))
    captured.program.run(model, values, 0, len(captured.program), training=True)
    assert torch.equal(captured.program.outputs(values), model(rows(4), 3))
    values = dict(enumerate(captured.program.bind((rows(4), WIDTH))))
    with pytest.raises(CandidateError, match="the model's forward decides by sizes"):
        captured.program.run(model, values, 0, len(captured.program), training=True)


def test_other_plain_inputs_are_pinned() -> None:
    model = Decides()
    captured = capture(model, {"x": rows(3), "times": 2, "name": "b"}, [])
    values = dict(enumerate(captured.program.bind({"x": rows(3), "times": 2, "name": "c"})))
    with pytest.raises(CandidateError, match="a batch has 'c' where the recorded one had 'b'"):
        captured.program.run(model, values, 0, len(captured.program), training=True)


class Inner(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x) if x.sum() > 0 else self.first(x)


def test_the_reason_names_the_module_and_the_rest_is_cut() -> None:
    captured = capture(nn.Sequential(nn.Linear(WIDTH, WIDTH), Inner(), nn.Linear(WIDTH, 2)), rows(3), [rows(5)])
    assert [node.name for node in captured.nodes] == ["0", "1", "2"]


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_of_torch_is_cut_between_its_layers(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True, norm_first=norm_first)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))
    sequences = torch.randn(5, 4, WIDTH)
    captured = capture(model, sequences[:3], [sequences, sequences[:2]])
    assert [node.name for node in captured.nodes] == ["0", "1.layers.0", "1.layers.1", "1.layers.2"]


def test_what_torch_and_python_are_asked_for_is_as_ever_afterwards() -> None:
    import builtins
    import math

    before = builtins.range, builtins.len, math.sqrt, nn.Module.__call__, torch.jit.is_tracing
    apply = vars(torch.autograd.Function)["apply"]
    capture(Length(), rows(3), [rows(5)])
    capture(Inner(), rows(3), [rows(5)])
    assert (builtins.range, builtins.len, math.sqrt, nn.Module.__call__, torch.jit.is_tracing) == before
    assert vars(torch.autograd.Function)["apply"] is apply
