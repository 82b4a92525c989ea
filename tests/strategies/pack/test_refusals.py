"""Candidates that cannot be packed say why, and go on alone as if they had never been in a pack."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hydra_tune.strategies.pack.pack import Pack
from hydra_tune.strategies.pack.refusal import CannotPack
from hydra_tune.strategies.pack.signature import signature
from tests.strategies.pack.members import MODELS, assert_same, candidate, member, whole


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.lstm(x.unsqueeze(-1))[0][:, -1])


class Counting(nn.Module):
    """Its outputs depend on a number that it keeps from call to call, which no batched form can know."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 3), [0]

    def forward(self, x: torch.Tensor) -> Any:
        self.calls[0] += 1
        return self.layer(x) * (1 + self.calls[0] % 3)


class Drawing(nn.Module):
    """Draws by a function that has no form for members."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) * torch.bernoulli(torch.full_like(x[:, :1], 0.5)) if self.training else self.layer(x)


def hooked() -> nn.Module:
    model = nn.Linear(6, 3)
    model.register_forward_hook(lambda module, inputs, output: output)
    return model


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"model": Recurrent().double()}, "module 'lstm' is a LSTM, which has no batched form"),
        ({"model": hooked().double()}, "the model has hooks"),
        ({"optimizer": torch.optim.Adagrad}, "optimizer Adagrad has no batched form"),
        ({"optimizer": lambda params: torch.optim.SGD(params[:1])}, "leaves out parameters that have gradients"),
        ({"optimizer": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1))}, "hyperparameter that is a tensor"),
    ],
    ids=["lstm", "hooks", "adagrad", "not all parameters", "tensor rate"],
)
def test_a_candidate_that_cannot_be_packed_says_why(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(CannotPack, match=why):
        signature(member(candidate("dense", "sgd", 0, **fields), 0))


@pytest.mark.parametrize("field", ["batch_size", "accumulate", "model", "optimizer", "loss", "clip_grad_norm"])
def test_what_shapes_the_computation_is_in_the_signature(field: str) -> None:
    others: dict[str, Any] = {
        "batch_size": 11, "accumulate": 2, "model": nn.Sequential(nn.Linear(6, 3)).double(), "clip_grad_norm": 1.0,
        "optimizer": torch.optim.SGD, "loss": lambda outputs, targets: nn.functional.cross_entropy(outputs, targets),
    }  # fmt: skip
    plain = signature(member(candidate("dense", "adam", 0), 0))
    assert plain == signature(member(candidate("dense", "adam", 1), 1))
    assert plain != signature(member(candidate("dense", "adam", 0, **{field: others[field]}), 0))


def test_closures_are_compared_by_what_they_hold() -> None:
    def loss(weight: float) -> Any:
        return lambda outputs, targets: weight * nn.functional.cross_entropy(outputs, targets)

    one, same, other = (signature(member(candidate("dense", "sgd", 0, loss=loss(w)), 0)) for w in (1.0, 1.0, 2.0))
    assert one == same != other


@pytest.mark.parametrize(("kind", "why"), [(Counting, "alone"), (Drawing, "random")])
def test_a_model_that_computes_otherwise_in_a_pack_is_noticed(kind: Any, why: str, monkeypatch: Any) -> None:
    """The first batch is compared; the members leave unchanged and equal their plain training."""
    monkeypatch.setitem(MODELS, "odd", kind)
    members = [member(candidate("odd", "adam", i), i) for i in range(3)]
    with pytest.raises(CannotPack, match=why):
        Pack(members).train_for(100.0)
    for i, each in enumerate(members):
        assert each.pack is None
        while each.epoch < 3:
            if each.train_for(100.0).epoch_done:
                each.end_epoch()
        if kind is Drawing:
            assert_same(each, whole(candidate("odd", "adam", i), i))
