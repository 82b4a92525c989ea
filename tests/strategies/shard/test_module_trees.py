"""Random trees of modules: shared ones, ones that are called twice or in some batches only, nested outputs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import hydra_tune as ht
from tests.strategies.shard.models import assert_same, candidate, finish, finish_in_shards, in_shards, start

WIDTH = 6
Tree = Any
"""Type: a leaf, or a kind of inner node with its children."""


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x) + self.shift)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.layer(self.norm(x)), 0.2, self.training)


class Inner(nn.Module):
    """Calls its children in one of several ways."""

    def __init__(self, kind: str, children: list[nn.Module]) -> None:
        super().__init__()
        self.kind, self.parts = kind, nn.ModuleList(children)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "sum":
            return sum((part(x) for part in self.parts), torch.zeros_like(x))
        for index, part in enumerate(self.parts):
            if self.kind == "sometimes" and index and float(x.detach().sum()) > 0:
                continue  # the path depends on the batch
            x = part(part(x)) if self.kind == "twice" else x + part(x)
        return x


class Model(nn.Module):
    """A tree, whose outputs are a dict with a dict in it."""

    def __init__(self, tree: Tree, shared: bool) -> None:
        super().__init__()
        self.root, self.head = made(tree, Dense() if shared else None), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        h = self.root(x)
        return {"all": {"logits": self.head(h)}, "regularizer": [h.pow(2).mean()]}


def made(tree: Tree, shared: nn.Module | None) -> nn.Module:
    if tree == "dense":
        return shared if shared is not None else Dense()
    if tree == "normed":
        return Normed()
    kind, children = tree
    return Inner(kind, [made(child, shared) for child in children])


def loss(outputs: dict[str, Any], targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs["all"]["logits"], targets) + 0.1 * outputs["regularizer"][0]


KINDS = st.sampled_from(["row", "sum", "twice", "sometimes"])
trees = st.recursive(
    st.sampled_from(["dense", "normed"]),
    lambda inner: st.tuples(KINDS, st.lists(inner, min_size=1, max_size=3)),
    max_leaves=6,
)


@settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(tree=trees, shared=st.booleans(), share=st.sampled_from([0.0, 0.3]), clip=st.sampled_from([None, 0.5]))
def test_any_tree_in_any_cut_equals_the_plain_loop(tree: Tree, shared: bool, share: float, clip: float | None) -> None:
    def build() -> ht.Candidate:
        torch.manual_seed(2)
        optimizer = partial(torch.optim.AdamW, lr=0.01)
        return candidate(
            model=Model(tree, shared).double(), loss=loss, optimizer=optimizer, clip_grad_norm=clip, metrics={}
        )

    expected = finish(start(build())).state()
    with TemporaryDirectory() as folder, in_shards(start(build()), share, Path(folder)) as sharded:
        finish_in_shards(sharded, seconds=0.0)
        assert_same(sharded.state(), expected)
