"""Models that broke an earlier version of shards: each equals a plain loop, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hydra_tune as ht
from hydra_tune.core.errors import CandidateError
from hydra_tune.strategies.shard.prepare import observe_candidate
from tests.strategies.shard.models import assert_same, candidate, finish, finish_in_shards, in_shards, start
from tests.strategies.shard.test_exactness import equal_in_shards


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.a, self.b, self.c, self.d):
            x = torch.tanh(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


class SharedReentrant(Base):
    """One layer three times, each computed again in a backward of its own: its gradient comes in parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x))
        for _ in range(3):
            x = torch.tanh(checkpoint(self.b, x, use_reentrant=True))
        return self.head(self.d(x))  # type: ignore[no-any-return]


class LookedAtAgain(Base):
    """Computes again with a weight that has had its gradient by then."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def part(h: torch.Tensor) -> torch.Tensor:
            return F.linear(self.b(h), self.d.weight.detach())

        x = checkpoint(part, torch.tanh(self.a(x)), use_reentrant=False)
        return self.head(torch.tanh(self.d(x)))  # type: ignore[no-any-return]


class BackwardHook(Base):
    def __init__(self) -> None:
        super().__init__()
        self.b.register_full_backward_hook(lambda m, given, _: (given[0] * 1.1 + 0.01 * m.weight.sum(),))


class Masked(Base):
    """Sets weights to zero through `.data`, clamps others, and replaces yet others by an average."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.a.weight.data *= torch.tril(torch.ones(6, 6))
        self.b.weight.data.clamp_(-0.2, 0.2)
        if self.training:
            self.c.weight.data = self.c.weight.data * 0.9 + self.d.weight.data * 0.1
        return super().forward(x)


class Routed(Base):
    """Decides by a part of itself whose graph is dropped, and then uses the same tensors."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.c(torch.tanh(self.a(x))).argmax(-1)
        h = torch.tanh(self.a(x)) * float(self.b(x).norm())
        return self.head(torch.tanh(self.d(h)) * chosen[:, None])  # type: ignore[no-any-return]


class Small(Base):
    """A parameter of one number, one without any, and a compiled part."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.5)), nn.Linear(6, 0)
        self.scripted = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.Tanh()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.scripted(x)) * self.scale + self.nothing(x).sum()


class Remembers(Base):
    """Keeps what it has seen in a list and in a tensor that it changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.mean = torch.zeros(6, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.append(len(x))
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return super().forward(x - self.mean) / (1 + len(self.seen))


class HooksItself(Base):
    """Sets hooks in its first forward, and notes that it has, as models of transformers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not getattr(self, "hooks_are_set", False):
            self.b.register_forward_hook(lambda _module, _given, out: out * 0.5)
            self.hooks_are_set = True
        return super().forward(x)


class Retyped(Base):
    """Gives a layer another dtype in the forward, as routers of experts do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.b = self.b.float()
        x = torch.tanh(self.b(torch.tanh(self.a(x)).float())).double()
        return self.head(torch.tanh(self.d(x)))  # type: ignore[no-any-return]


class OfATable(Base):
    """Takes a few rows of a large buffer, which the backward needs too."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor
        self.register_buffer("table", torch.linspace(0, 1, 6000).view(1000, 6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.c(self.table[: len(x)]))


class Centred(nn.Module):
    """A loss with a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.centre: torch.Tensor
        self.register_buffer("centre", torch.zeros(3, dtype=torch.float64))

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.centre.mul_(0.9).add_(outputs.detach().mean(0), alpha=0.1)
        return F.cross_entropy(outputs - self.centre, targets)


def twice(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that makes a backward of its own."""
    if torch.is_grad_enabled():
        (outputs.pow(2).mean() * 0.1).backward(retain_graph=True)  # type: ignore[no-untyped-call]
    return F.cross_entropy(outputs, targets)


EXACT: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "a shared layer with reentrant checkpoints": (SharedReentrant, {}),
    "a weight that is looked at again": (LookedAtAgain, {}),
    "a backward hook": (BackwardHook, {}),
    "weights rewritten in the forward": (Masked, {}),
    "routing": (Routed, {}),
    "small parameters": (Small, {}),
    "attributes": (Remembers, {}),
    "a loss with a buffer": (Base, {"loss": Centred}),
    "a backward in the loss": (Base, {"loss": lambda: twice}),
    "hooks set in the forward": (HooksItself, {}),
    "another dtype": (Retyped, {}),
    "rows of a buffer": (OfATable, {}),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_hard_model_equals_the_plain_loop(name: str, tmp_path: Path) -> None:
    model, fields = EXACT[name]

    def build() -> ht.Candidate:
        torch.manual_seed(4)
        made = {key: value() for key, value in fields.items()}
        return candidate(model=model().double(), optimizer=partial(torch.optim.AdamW, lr=0.01), **made)

    assert equal_in_shards(build, tmp_path, rebuilt=name == "small parameters") > 1


def test_hooks_set_in_the_forward_are_set_in_each_worker(tmp_path: Path) -> None:
    def build() -> ht.Candidate:
        torch.manual_seed(4)
        return candidate(model=HooksItself().double())

    expected = finish(start(build())).state()
    with in_shards(start(build()), 0.0, tmp_path) as sharded:
        sharded.rebuild = build
        finish_in_shards(sharded, seconds=0.0, anew=True)
        assert_same(sharded.state(), expected)


def test_a_stored_observation_gives_parameters_their_other_dtype(tmp_path: Path) -> None:
    for _ in range(2):  # the second time it is read from the disk
        model = Retyped().double()
        found = observe_candidate(start(candidate(model=model)), tmp_path)
        assert {name for name, _ in found.observed.retyped} == {"b.weight", "b.bias"}
        assert model.b.weight.dtype is torch.float32


def transposed() -> nn.Module:
    model = Base().double()
    model.d.weight.data = model.a.weight.data.t()
    return model


def remembered() -> nn.Module:
    model = Base().double()
    model.kept = model.a.weight.detach()  # type: ignore[assignment]
    return model


class Thawing(Base):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.b.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls > 3:
            self.b.requires_grad_(True)
        return super().forward(x)


def hooked(params: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": transposed}, r"has the memory of parameter 'a.weight'"),
        ({"model": remembered}, r"'kept' has the memory of parameter 'a.weight'"),
        ({"model": lambda: Thawing().double()}, r"parameter 'b\.\w+' was frozen when the trial began"),
        ({"model": lambda: Base().double(), "optimizer": lambda: hooked}, r"the optimizer has hooks of its steps"),
    ],
)
def test_what_shards_cannot_do_is_refused(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(CandidateError, match=said):
        equal_in_shards(lambda: candidate(**{name: made() for name, made in fields.items()}), tmp_path)
