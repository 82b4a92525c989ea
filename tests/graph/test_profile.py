"""A profile's bytes compared with sums done by hand, and profiles on disk."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from hydra_tune.graph.capture import capture
from hydra_tune.graph.costs import NodeCost
from hydra_tune.graph.profile import Profile, profile
from hydra_tune.graph.profile_cache import keep_profile, load_profile
from hydra_tune.strategies.shard import prepare
from hydra_tune.strategies.shard.prepare import examine
from tests.strategies.shard.models import candidate, start

FLOAT = 4
ROWS = 8


def measured(model: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer], **options: Any) -> Profile:
    inputs = torch.randn(ROWS, 32)
    captured = capture(model, inputs, [inputs])

    def of_one(_name: str, parameter: nn.Parameter) -> torch.optim.Optimizer:
        return optimizer([parameter])

    return profile(model, captured, [inputs], lambda out: out.pow(2).mean(), of_one, **options)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 4))


# In floats; a bias of four takes sixteen, as every tensor starts at a multiple of 64 bytes.
SIZES = [32 * 64 + 64, 64 * 128 + 128, 128 * 4 + 16]
OPTIMIZERS: list[tuple[Callable[..., torch.optim.Optimizer], int]] = [
    (partial(torch.optim.SGD, lr=0.1), 0),
    (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1),
    (partial(torch.optim.Adam, lr=0.1), 2),
    (partial(torch.optim.Adam, lr=0.1, amsgrad=True), 3),
    (partial(torch.optim.RMSprop, lr=0.1), 1),
    (partial(torch.optim.Adagrad, lr=0.1), 1),
]


@pytest.mark.parametrize(("optimizer", "times"), OPTIMIZERS, ids=["sgd", "momentum", "adam", "amsgrad", "rms", "ada"])
def test_parameters_and_optimizer_state(optimizer: Callable[..., Any], times: int) -> None:
    nodes = measured(mlp(), optimizer).nodes
    assert [node.parameter_bytes for node in nodes] == [FLOAT * size for size in SIZES]
    assert [node.optimizer_bytes for node in nodes] == [times * FLOAT * size for size in SIZES]
    assert [node.largest_parameter_bytes for node in nodes] == [FLOAT * n for n in (32 * 64, 64 * 128, 128 * 4)]


def test_activations_and_what_crosses_the_cuts() -> None:
    found = measured(mlp(), OPTIMIZERS[0][0])
    assert found.input_bytes == ROWS * 32 * FLOAT
    # A linear layer saves its input, a tanh its output; the batch is there anyway, and a tanh's output is the next
    # layer's input, which is saved once.
    widths = [64, 128]
    assert [node.boundary_bytes for node in found.nodes] == [ROWS * width * FLOAT for width in widths] + [
        ROWS * 4 * FLOAT
    ]
    assert [node.activation_bytes for node in found.nodes[:2]] == [ROWS * width * FLOAT for width in widths]
    assert ROWS * 4 * FLOAT <= found.nodes[2].activation_bytes <= 3 * ROWS * 4 * FLOAT
    assert all(node.cut_allowed for node in found.nodes[:2])


def test_a_backward_takes_gradients_and_a_steps_temporaries_and_not_the_state_again() -> None:
    """Adam without foreach makes two temporaries of a parameter's size."""
    nodes = measured(mlp(), partial(torch.optim.Adam, lr=0.1, foreach=False)).nodes
    weight = 64 * 128 * FLOAT
    passed_back = 3 * ROWS * (64 + 128) * FLOAT
    assert nodes[1].backward_peak_bytes <= 2 * weight + passed_back
    plain = measured(mlp(), partial(torch.optim.SGD, lr=0.1, foreach=False)).nodes
    assert plain[1].backward_peak_bytes <= weight + passed_back


def test_buffers_are_counted_where_they_are_used() -> None:
    nodes = measured(nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Linear(16, 2)), OPTIMIZERS[2][0]).nodes
    assert [node.buffer_bytes for node in nodes] == [0, 3 * 64, 0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def test_a_tied_parameter_has_one_owner() -> None:
    first, middle, last = measured(Tied(), OPTIMIZERS[2][0]).nodes
    weight, bias = 32 * 32 * FLOAT, 32 * FLOAT
    assert (first.parameter_bytes, last.parameter_bytes) == (weight + bias, bias)
    assert (first.optimizer_bytes, last.optimizer_bytes) == (2 * (weight + bias), 2 * bias)
    assert (first.shared, first.tied) == ({"first.weight": weight}, {})
    assert (last.shared, last.tied) == ({}, {"first.weight": weight})
    assert not middle.shared
    assert not middle.tied


class SharedBuffer(nn.Module):
    """A buffer that the second and the fourth layer use, and the fourth may change."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(5)])
        self.register_buffer("scale", torch.ones(32))
        self.scale: torch.Tensor
        self.changes = changes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i in (1, 3):
                x = x * self.scale
        if self.changes:
            self.scale.mul_(0.9)
        return x


@pytest.mark.parametrize(
    ("changes", "allowed"), [(False, [True] * 4), (True, [True, False, False, False])], ids=["read", "changed"]
)
def test_no_cut_between_users_of_a_buffer_that_changes(changes: bool, allowed: list[bool]) -> None:
    nodes = measured(SharedBuffer(changes), OPTIMIZERS[0][0]).nodes
    assert [node.cut_allowed for node in nodes[:-1]] == allowed


class Changes(nn.Module):
    """What the first layer makes is changed in place by the third, itself or by a view, and used at the end.

    Changed itself, the later use is one of the changed value. Changed by a view, it is one of the value before.
    """

    def __init__(self, by: str) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(32, 32) for _ in range(4))
        self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        part = h[:, :8] if self.by == "view" else h
        y = self.c(torch.tanh(self.b(torch.tanh(h))))
        if self.by != "nothing":
            part.mul_(0.5)
        return self.d(y) + (h if self.by != "last" else 0)


ALLOWED = {"nothing": [True] * 3, "itself": [True] * 3, "last": [True] * 3, "view": [False, False, True]}


@pytest.mark.parametrize("by", sorted(ALLOWED))
def test_values_that_are_changed_in_place(by: str) -> None:
    found = measured(Changes(by), OPTIMIZERS[0][0])
    assert [node.cut_allowed for node in found.nodes[:-1]] == ALLOWED[by]
    assert bool(found.mutated) == (by != "nothing")


def test_measuring_leaves_weights_buffers_gradients_modes_and_random_streams_alone() -> None:
    model = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 2))
    model[1].eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs = torch.randn(ROWS, 32)
    state = torch.get_rng_state()
    captured = capture(model, inputs, [inputs])
    profile(model, captured, [inputs], lambda out: out.pow(2).mean(), lambda _name, p: torch.optim.SGD([p], lr=1.0))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model] == [True, False, True, True]
    assert model[0].weight.grad is not None
    assert bool((model[0].weight.grad == 1).all())
    assert model[3].weight.grad is None


def test_points_that_the_user_prefers() -> None:
    nodes = measured(mlp(), OPTIMIZERS[0][0], preferred=["2"]).nodes
    assert [node.preferred for node in nodes] == [False, True, False]


# Keeping profiles


def test_a_kept_profile_is_the_one_that_was_measured(tmp_path: Path) -> None:
    found = measured(mlp(), OPTIMIZERS[2][0])
    keep_profile(tmp_path / "profiles", "key", found)
    assert load_profile(tmp_path / "profiles", "key") == found
    assert load_profile(tmp_path / "profiles", "other") is None
    assert [path.name for path in (tmp_path / "profiles").iterdir()] == ["key.json"]


def test_a_profile_is_measured_once_for_candidates_that_differ_in_rates_alone(tmp_path: Path) -> None:
    def nodes(**fields: Any) -> tuple[NodeCost, ...]:
        return examine(start(candidate(**fields)), tmp_path).profile.nodes

    first = nodes(optimizer=partial(torch.optim.Adam, lr=0.1))
    # Seconds are never measured the same twice: equal ones were read.
    assert nodes(optimizer=partial(torch.optim.Adam, lr=0.2, betas=(0.8, 0.9)), clip_grad_norm=1.0) == first
    assert len(list(tmp_path.iterdir())) == 1
    for other in (
        {"optimizer": partial(torch.optim.Adam, lr=0.1, amsgrad=True)}, {"width": 4}, {"batch_size": 6}, {"depth": 3},
        {"optimizer": partial(torch.optim.SGD, lr=0.1)}, {"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.5)},
        {"loss": double_cross_entropy},
    ):  # fmt: skip
        before = len(list(tmp_path.iterdir()))
        nodes(**({"optimizer": partial(torch.optim.Adam, lr=0.1)} | other))
        assert len(list(tmp_path.iterdir())) == before + 1, other


class Scaled(nn.Module):
    """Its rows are a plain number, once and for all in a recording: that is wrong, and the layer is kept whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * int(x.shape[0])


def test_a_model_that_is_captured_in_larger_nodes_is_measured_once_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[int] = []
    plain = prepare.profile
    monkeypatch.setattr(prepare, "profile", lambda *args: measured.append(1) or plain(*args))
    for _ in range(2):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 6), Scaled(), nn.Linear(6, 3)).double()
        prospect = examine(start(candidate(model=model)), tmp_path)
        assert "1" in [node.name for node in prospect.captured.nodes], "the layer is one node"
    assert measured == [1]


def test_a_profile_is_of_one_dtype(tmp_path: Path) -> None:
    for dtype in (torch.float64, torch.float32):
        data = TensorDataset(torch.randn(10, 6, dtype=dtype), torch.randint(3, (10,)))
        model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)).to(dtype)
        examine(start(candidate(model=model, train=data, valid=data)), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def double_cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 2 * F.cross_entropy(outputs, targets)


@pytest.mark.parametrize("damage", ["truncated", "empty", "not json", "older"])
def test_a_damaged_profile_is_measured_again(damage: str, tmp_path: Path) -> None:
    expected = examine(start(candidate()), tmp_path).profile
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    damaged = {"truncated": text[: len(text) // 2], "empty": "", "not json": "\x00", "older": "{}"}[damage]
    path.write_text(damaged)
    found = examine(start(candidate()), tmp_path).profile
    assert [node.parameter_bytes for node in found.nodes] == [node.parameter_bytes for node in expected.nodes]
    assert path.read_text() != damaged
    assert load_profile(tmp_path, path.stem) is not None
