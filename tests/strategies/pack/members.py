"""Small candidates of one shape for packs, and their plain training to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

import hydra_tune as ht
from hydra_tune.core.seeds import seed_everything
from hydra_tune.strategies.pack.member import Member
from hydra_tune.training.loop import Training
from tests.candidates import accuracy, rows

CPU = torch.device("cpu")
TRAIN, VALID = rows(53), rows(21)


class Attentive(nn.Module):
    """A transformer layer over six tokens, with dropout in its attention."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.embed = nn.Linear(1, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=p, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.layer(self.embed(x.unsqueeze(-1))).mean(1))


class Tied(nn.Module):
    """An embedding that is also the output layer, a frozen parameter and an unused one."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight
        self.head = nn.Linear(5, 3)
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.dropout = p

    def forward(self, x: torch.Tensor) -> Any:
        tokens = (x.abs() * 2).long().clamp(0, 4)
        hidden = nn.functional.dropout(self.out(self.embed(tokens).mean(1)), self.dropout, self.training)
        return self.head(torch.tanh(hidden + self.frozen))


class Convolved(nn.Module):
    """Convolutions with batch-norm and dropout of whole channels."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 3, 2, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout2d(p), nn.Flatten(),
            nn.Linear(6, 3),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x.view(-1, 1, 2, 3))


class Noisy(nn.Module):
    """Gaussian noise in training, group and layer norms, and two dropouts of one probability."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm, self.groups, self.drop = nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.AlphaDropout(max(p, 0.05))

    def forward(self, x: torch.Tensor) -> Any:
        hidden = nn.functional.gelu(self.groups(self.first(x)))
        if self.training:
            hidden = hidden + 0.1 * torch.randn_like(hidden)
        return self.last(self.drop(self.norm(hidden)))


def dense(p: float) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 7, bias=False), nn.BatchNorm1d(7), nn.SiLU(), nn.Dropout(p), nn.Linear(7, 3)
    )  # fmt: skip


MODELS: dict[str, Callable[[float], nn.Module]] = {
    "dense": dense, "convolved": Convolved, "attentive": Attentive, "tied": Tied, "noisy": Noisy,
}  # fmt: skip


def _groups(kind: Any, params: Sequence[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """Two groups, the second with a tenth of the rate."""
    few, others = [p for p in params if p.ndim < 2], [p for p in params if p.ndim > 1]
    made: torch.optim.Optimizer = kind([{"params": others}, {"params": few, "lr": options["lr"] / 10}], **options)
    return made


def optimizer(name: str, i: int) -> Callable[..., torch.optim.Optimizer]:
    """The optimizer of member i; all its numbers differ from those of the others."""
    lr, decay = 0.01 * (i + 1), 0.001 * i
    return {
        "sgd": partial(torch.optim.SGD, lr=lr, weight_decay=decay),
        "momentum": partial(torch.optim.SGD, lr=lr, momentum=0.5 + 0.1 * i, dampening=0.05 * i, weight_decay=decay),
        "nesterov": partial(_groups, torch.optim.SGD, lr=lr, momentum=0.5 + 0.1 * i, nesterov=True),
        "adam": partial(torch.optim.Adam, lr=lr, betas=(0.8 + 0.02 * i, 0.9 + 0.01 * i), eps=1e-4, weight_decay=decay),
        "adamw": partial(_groups, torch.optim.AdamW, lr=lr, eps=1e-4, weight_decay=decay, amsgrad=True),
        "rmsprop": partial(torch.optim.RMSprop, lr=lr, alpha=0.8 + 0.02 * i, eps=1e-4, momentum=0.1 + 0.1 * i,
                           centered=True, weight_decay=decay),
    }[name]  # fmt: skip


OPTIMIZERS = ("sgd", "momentum", "nesterov", "adam", "adamw", "rmsprop")
SCHEDULES: dict[str, dict[str, Any]] = {
    "none": {},
    "steps": {"scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.7), "schedule_every": "step"},
    "cosine": {"scheduler": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=4)},
    "plateau": {"scheduler": partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0)},
}


def candidate(architecture: str, kind: str, i: int, epochs: int = 3, **fields: Any) -> ht.Candidate:
    """Candidate i of a kind: as trial i of a search would build it."""
    seed_everything(1000 + i)
    clip = {"clip_grad_norm": 0.3 + 0.3 * i} if fields.pop("clip", False) else {}
    smooth = fields.pop("smooth", False)
    given: dict[str, Any] = {
        "model": MODELS[architecture]((0.0, 0.1, 0.3, 0.5)[i % 4]).double(),
        "loss": partial(nn.functional.cross_entropy, label_smoothing=0.1 * i) if smooth else nn.CrossEntropyLoss(),
        "optimizer": optimizer(kind, i), "train": TRAIN, "valid": VALID, "batch_size": 10, "epochs": epochs,
        "metrics": {"accuracy": accuracy}, **clip, **SCHEDULES[fields.pop("schedule", "none")],
    }  # fmt: skip
    return ht.Candidate(**(given | fields))


def member(made: ht.Candidate, i: int) -> Member:
    return Member(made, made.train, made.valid, 100 + i, CPU)


def whole(made: ht.Candidate, i: int, epochs: int | None = None) -> Training:
    """Train a candidate alone, by the plain loop."""
    training = Training(made, made.train, made.valid, 100 + i, CPU)
    while training.epoch < (made.epochs if epochs is None else epochs):
        if training.train_for(100.0).epoch_done:
            training.end_epoch()
    return training


def assert_same(found: Training, expected: Training, tolerance: float = 1e-9) -> None:
    """Compare all state: weights, buffers, optimizer, schedule, random streams, position and history."""
    ours, theirs = found.state(), expected.state()
    assert ours["position"].keys() == theirs["position"].keys()
    for part in ("tensors", "gradients", "optimizer", "scheduler", "position", "history", "extra", "data"):
        _assert_close(ours[part], theirs[part], tolerance, part)
    assert torch.equal(ours["random"]["torch_state"], theirs["random"]["torch_state"])


def _assert_close(found: Any, expected: Any, tolerance: float, where: str) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            _assert_close(found[key], expected[key], tolerance, f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for index, pair in enumerate(zip(found, expected, strict=True)):
            _assert_close(*pair, tolerance, f"{where}.{index}")
    elif isinstance(expected, torch.Tensor | float):
        torch.testing.assert_close(
            torch.as_tensor(found, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64), rtol=0,
            atol=tolerance, msg=lambda text: f"{where}: {text}",
        )  # fmt: skip
    else:
        assert found == expected, where
