"""The parts found in all families of models; a subnet computes what its part of the model computes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_tune.core.errors import CandidateError
from hydra_tune.search_spaces import gpt, resnet, transformer
from hydra_tune.strategies.subnets.deal import deal, put, take
from hydra_tune.strategies.subnets.find import find_structure
from hydra_tune.strategies.subnets.shrink import subnet
from tests.strategies.subnets.test_deal import tensors_of

IMAGE: Any = SimpleNamespace(kind="image", input_shape=(1, 8, 8), outputs=5)
TEXT: Any = SimpleNamespace(kind="text", input_shape=(6,), outputs=11)
SIZES = {"heads": 4, "head_dim": 4, "depth": 2, "expansion": 2, "dropout": 0.0}


class Own(nn.Module):
    """A forward of the user's own, with functions between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm, self.c = nn.Linear(4, 12), nn.Linear(12, 10), nn.BatchNorm1d(10), nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.a(x)) * 0.5
        return self.c(torch.tanh(self.norm(self.b(hidden))))  # type: ignore[no-any-return]


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1),
        nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 12), nn.ReLU(), nn.Linear(12, 5),
    )  # fmt: skip


def encoder(batch_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=batch_first)
    return nn.Sequential(nn.Linear(8, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 3))


def deep_resnet() -> nn.Module:
    return resnet.model({"channels": 4, "stages": 2, "blocks_0": 3, "blocks_1": 2, "dropout": 0.0}, IMAGE)


MODELS: dict[str, tuple[Any, tuple[int, ...], str, dict[str, int]]] = {
    "own forward": (Own, (3, 4), "auto", {"neurons": 22}),
    "convolutional": (convolutional, (3, 1, 8, 8), "auto", {"filters": 14, "neurons": 12}),
    "resnet by depth": (deep_resnet, (3, 1, 8, 8), "auto", {"blocks": 4}),
    "resnet by width": (deep_resnet, (3, 1, 8, 8), "width", {"filters": 28}),
    "transformer": (
        lambda: transformer.model(SIZES, IMAGE), (3, 1, 8, 8), "auto", {"neurons": 64, "heads": 8},
    ),
    "torch's encoder": (lambda: encoder(True), (3, 5, 8), "auto", {"neurons": 48, "heads": 8}),
    "torch's encoder, steps first": (lambda: encoder(False), (5, 3, 8), "auto", {"neurons": 48, "heads": 8}),
}  # fmt: skip


@pytest.fixture
def plain_attention() -> Iterator[None]:
    """torch's kernel for encoders in evaluation takes weights past their modules; subnets are only ever trained."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.usefixtures("plain_attention")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("subnets", [2, 4])
def test_a_subnet_computes_what_its_part_of_the_model_does(name: str, subnets: int) -> None:
    """The whole model, with all that the others were dealt at zero where it is summed up, gives the same."""
    make, shape, how, kinds = MODELS[name]
    torch.manual_seed(0)
    model = make().double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.running_mean.uniform_(-0.1, 0.1)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.1, 0.1)
    x = torch.randn(shape, dtype=torch.float64)
    structure = find_structure(model, x, subnets, how)
    assert structure.kinds() == kinds
    tensors = tensors_of(model)
    for dealt in deal(structure, subnets, 1, 0):
        made = subnet(model, structure, dealt, tensors).eval()
        silenced = dict(tensors)
        for group in structure.groups:
            for cut in [cut for cut in group.cuts if cut.dim == 1]:
                part = take(structure, dealt, cut.parameter, tensors[cut.parameter])
                assert part is not None
                silenced[cut.parameter] = torch.zeros_like(tensors[cut.parameter])
                put(structure, dealt, cut.parameter, silenced[cut.parameter], part)
            absent = [m for i, m in enumerate(group.modules) if i not in dealt[group.name].tolist()]
            for end in [end for end in group.ends if any(end.startswith(f"{m}.") for m in absent)]:
                silenced[end] = torch.zeros_like(tensors[end])
        with torch.no_grad():
            expected = torch.func.functional_call(model, silenced, x)
            torch.testing.assert_close(made(x), expected, rtol=0, atol=1e-9)
        assert sum(p.numel() for p in made.parameters()) < sum(p.numel() for p in model.parameters())


def test_a_language_model_with_tied_weights_keeps_them_tied() -> None:
    model = gpt.model(SIZES, TEXT)
    tokens = torch.randint(0, 11, (3, 6))
    structure = find_structure(model, tokens, 2)
    assert structure.kinds() == {"neurons": 64, "heads": 8}
    made = subnet(model, structure, deal(structure, 2, 0, 0)[1], tensors_of(model))
    assert made.get_parameter("head.weight") is made.get_parameter("embed.token.weight")
    assert made(tokens).shape == model(tokens).shape
    assert structure.is_shared("embed.token.weight")


def test_residual_nets_share_stem_strided_blocks_and_head() -> None:
    structure = find_structure(deep_resnet(), torch.randn(3, 1, 8, 8), 2)
    (group,) = structure.groups
    assert group.modules == ("stage_0_block_0", "stage_0_block_1", "stage_0_block_2", "stage_1_block_1")
    assert all(
        structure.is_shared(name) for name in ("stem.conv.weight", "stage_1_block_0.conv_0.weight", "head.weight")
    )
    assert set(group.ends) == {f"{m}.norm_1.{own}" for m in group.modules for own in ("weight", "bias")}


class CountsOnWidth(nn.Module):
    """A forward that only works with all twelve neurons of `b`."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.b(torch.relu(self.a(x)))
        assert hidden.shape[1] == 12, "twelve"
        return self.c(torch.relu(hidden))  # type: ignore[no-any-return]


def test_a_width_that_the_forward_counts_on_is_not_dealt_out() -> None:
    structure = find_structure(CountsOnWidth(), torch.randn(3, 4), 2)
    assert [group.name for group in structure.groups] == ["a"]


class Twice(nn.Module):
    """One layer called twice, and one whose outputs are added to their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.twice, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.a(x))
        return self.c(hidden + self.twice(self.twice(hidden)))  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Any, tuple[int, ...], int, str, str]] = {
    "one layer": (nn.Sequential(nn.Linear(4, 3)), (3, 4), 2, "auto", "they are the model's output"),
    "residual": (Twice(), (3, 4), 2, "auto", "add mixes them|twice mixes them"),
    "narrow": (
        nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)),
        (3, 4),
        4,
        "auto",
        "give 3 subnets or fewer",
    ),
    "no blocks": (Own(), (3, 4), 2, "depth", r"no two residual blocks .*give deal: width"),
    "recurrent": (nn.LSTM(4, 8), (3, 5, 4), 2, "auto", "nothing of the model can be dealt out to subnets"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_with_nothing_to_deal_out_is_refused_with_the_reason(case: str) -> None:
    model, shape, subnets, how, said = REFUSED[case]
    with pytest.raises(CandidateError, match=said):
        find_structure(model, torch.randn(shape), subnets, how)
