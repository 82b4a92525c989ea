"""Models that a recording cannot follow are one node, with a reason that a user understands."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hydra_tune.graph.capture import capture, untouched
from hydra_tune.graph.recorded_gradients import other_gradients

pytestmark = pytest.mark.smoke


def wrapped(forward: Any) -> Any:
    @functools.wraps(forward)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return call


class Decorated(nn.Module):
    """As models of transformers are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    @wrapped
    def forward(self, x: torch.Tensor, **_options: Any) -> torch.Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x) if random.random() < 0.5 else self.first(x)  # type: ignore[no-any-return]


class OfItself(nn.Module):
    """Hands a part of itself to torch, which calls it where no recording sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.first, x, use_reentrant=True)  # type: ignore[no-any-return]


class Attributes(nn.Module):
    """Sets an attribute of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h: torch.Tensor = self.first(x)
        h.data = h.data + 1
        return h


class Counts(nn.Module):
    """Gives a number that it has read from a tensor, as routers of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x, int((self.gate(x) > 0).sum())


class Divides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.counts, self.second = nn.Linear(4, 4), Counts(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, number = self.counts(self.first(x))
        return torch.cat([self.second(h[:number]), h[number:]])


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


class HooksATensor(Plain):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 2)
        return self.second(h)  # type: ignore[no-any-return]


def test_a_number_that_a_module_has_read_from_a_tensor_is_not_taken_for_a_constant() -> None:
    pilot = torch.randn(3, 4)
    captured = capture(Divides(), pilot, [pilot])
    assert len(captured.nodes) == 1
    assert captured.whole_because.startswith("an index of a tensor's contents") or "int()" in captured.whole_because


def test_other_gradients_are_found() -> None:
    inputs = torch.randn(3, 4)
    program = capture(Plain(), inputs, [inputs]).program
    assert not other_gradients(program, Plain(), inputs)
    assert "'first.weight' another gradient" in other_gradients(program, HooksATensor(), inputs)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Choosing, "its forward draws numbers from Python's or NumPy's generators, which a recording would fix"),
        (OfItself, "CheckpointFunction is given a function, whose tensors a recording would not see"),
        (Attributes, "an attribute of a tensor is set (data)"),
        (HooksATensor, "it sets hooks on a tensor, or looks at how a tensor was made"),
    ],
)
def test_the_reason_is_said_in_words(model: Any, said: str) -> None:
    captured = capture(model(), torch.randn(3, 4), [torch.randn(5, 4)])
    assert len(captured.nodes) == 1
    assert captured.whole_because == said


def test_a_decorated_forward_is_recorded_inside() -> None:
    captured = capture(Decorated(), torch.randn(3, 4), [torch.randn(5, 4)])
    assert [node.name for node in captured.nodes] == ["first", "second"]


def test_a_pilot_run_leaves_embeddings_as_they_were() -> None:
    model = nn.Embedding(5, 3, max_norm=0.1)
    before = model.weight.detach().clone()
    with untouched(model):
        model(torch.arange(5))
        assert not torch.equal(model.weight, before)
    assert torch.equal(model.weight, before)
