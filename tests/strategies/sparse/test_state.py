"""Compressed state: its bytes by the formula, and its steps bit for bit those of dense training under the mask."""

from __future__ import annotations

import copy
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hydra_tune.strategies.shard.optimizers import OptimizerParts, options_of
from hydra_tune.strategies.sparse.masks import Masks, magnitude_masks
from hydra_tune.strategies.sparse.state import CompressedState, trained_parameters

pytestmark = pytest.mark.smoke


def mlp(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)).to(dtype)


def compressed(
    model: nn.Module, masks: Masks, optimizer: Any = torch.optim.AdamW, *, mixed: bool = False, **options: Any
) -> tuple[CompressedState, Any]:
    made = optimizer(model.parameters(), **({"lr": 0.01} | options))
    parts = OptimizerParts.of(made, {id(p): name for name, p in model.named_parameters()})
    trained = trained_parameters(model, parts)
    return CompressedState(trained, masks, parts, options_of(made), mixed=mixed), options_of(made)


def batches(count: int, dtype: torch.dtype = torch.float32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 64, generator=generator, dtype=dtype), torch.randint(0, 10, (16,), generator=generator))
        for _ in range(count)
    ]


def stored(tensors: list[torch.Tensor]) -> int:
    """Bytes of the storages behind some tensors, each counted once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(found.values())


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("sparsity", [0.5, 0.8, 0.9])
def test_pruned_layers_take_the_bytes_of_the_formula_to_the_byte(mixed: bool, sparsity: float):
    model = mlp()
    masks = magnitude_masks(model, sparsity, 1)
    state, options = compressed(model, masks, mixed=mixed)
    inputs, targets = batches(1)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed):
        outputs = model(inputs)
    F.cross_entropy(outputs.float(), targets).backward()
    state.step(options, None)
    weights = sum(layer.weight.numel() for layer in state.layers)
    kept = sum(len(mask) for mask in masks.values())
    assert kept == pytest.approx(weights * (1 - sparsity), abs=3)
    # Gradients are counted through the flat tensor that all layers share.
    tensors = [t for layer in state.layers for t in layer.tensors()]
    assert stored(tensors) == (2 * weights + 24 * kept if mixed else 4 * weights + 16 * kept)
    whole = sum(p.numel() for p in state.whole.values())
    assert stored(state.tensors()) - stored(tensors) == 16 * whole


@pytest.mark.parametrize("optimizer", [
    torch.optim.AdamW, partial(torch.optim.Adam, weight_decay=0.1), partial(torch.optim.SGD, momentum=0.9),
    torch.optim.RMSprop,
])  # fmt: skip
@pytest.mark.parametrize("accumulate", [1, 3])
def test_steps_equal_dense_training_under_the_mask_bit_for_bit(optimizer: Any, accumulate: int):
    model = mlp()
    masks = magnitude_masks(model, 0.9, 1)
    dense = copy.deepcopy(model)
    zeros = {}
    for name, parameter in dense.named_parameters():
        if name in masks:
            zeros[name] = torch.ones(parameter.numel(), dtype=torch.bool)
            zeros[name][masks[name].long()] = False
            zeros[name] = zeros[name].reshape(parameter.shape)
            parameter.data[zeros[name]] = 0.0
    plain = optimizer(dense.parameters(), lr=0.01)
    state, options = compressed(model, masks, optimizer)
    for number, (inputs, targets) in enumerate(batches(12), start=1):
        state.more = number % accumulate != 0
        losses = [F.cross_entropy(each(inputs), targets) / accumulate for each in (model, dense)]
        assert losses[0].item() == losses[1].item()
        for loss in losses:
            loss.backward()
        if state.more:
            continue
        for name, parameter in dense.named_parameters():
            if name in masks:
                parameter.grad[zeros[name]] = 0.0
        plain.step()
        plain.zero_grad()
        state.step(options, None)
    for (name, one), other in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(one, other), name
        if name in masks:
            assert int((one == 0).sum()) >= one.numel() - len(masks[name])


def test_clipping_is_by_the_norm_of_what_is_trained():
    model = mlp(torch.float64)
    masks = magnitude_masks(model, 0.9, 1)
    state, options = compressed(model, masks, torch.optim.SGD, lr=1.0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    inputs, targets = batches(1, torch.float64)[0]
    (1000 * F.cross_entropy(model(inputs), targets)).backward()
    state.step(options, 0.5)
    moved = torch.cat([(before[name] - p.detach()).reshape(-1) for name, p in model.named_parameters()])
    assert float(moved.norm()) == pytest.approx(0.5, rel=1e-6)


def test_a_layer_without_a_gradient_does_not_count_in_clipping():
    model = mlp(torch.float64)
    state, options = compressed(model, magnitude_masks(model, 0.9, 1), torch.optim.SGD, lr=1.0)
    (inputs, targets), (again, _) = batches(2, torch.float64)
    F.cross_entropy(model(inputs), targets).backward()
    state.step(options, None)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    (1000 * model[0](again).sum()).backward()
    state.step(options, 0.5)
    moved = torch.cat([(before[name] - p.detach()).reshape(-1) for name, p in model.named_parameters()])
    assert float(moved.norm()) == pytest.approx(0.5, rel=1e-6)


def test_parameters_that_a_batch_does_not_use_stay_as_they_are():
    """In torch, weight decay and momentum go by steps, and a parameter without a gradient makes none."""
    model = nn.ModuleDict({name: nn.Linear(64, 10) for name in ("used", "other")})
    dense = copy.deepcopy(model)
    given = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5}
    state, options = compressed(model, magnitude_masks(model, 0.0, 1), torch.optim.SGD, **given)
    plain = torch.optim.SGD(dense.parameters(), **given)
    for name, (inputs, targets) in zip(("used", "other", "used", "used"), batches(4), strict=True):
        for each in (model, dense):
            F.cross_entropy(each[name](inputs), targets).backward()
        state.step(options, None)
        plain.step()
        plain.zero_grad()
    for (name, one), other in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_frozen_parameters_stay_as_they_are():
    model = mlp()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    before = copy.deepcopy(model[0])
    state, options = compressed(model, magnitude_masks(model, 0.9, 1), weight_decay=0.5)
    inputs, targets = batches(1)[0]
    F.cross_entropy(model(inputs), targets).backward()
    state.step(options, None)
    assert all(torch.equal(a, b) for a, b in zip(model[0].parameters(), before.parameters(), strict=True))


def test_there_is_never_more_than_one_dense_gradient():
    model = mlp()
    state, _ = compressed(model, magnitude_masks(model, 0.9, 1))
    seen: list[weakref.ref[torch.UntypedStorage]] = []
    alive: list[int] = []
    for layer in state.layers:
        plain = layer.gather

        def watched(layer: Any = layer, plain: Any = plain) -> None:
            alive.append(sum(reference() is not None for reference in seen))
            seen.append(weakref.ref(layer.weight.grad.untyped_storage()))
            plain()
            assert layer.weight.grad is None

        layer.gather = watched
    inputs, targets = batches(1)[0]
    F.cross_entropy(model(inputs), targets).backward()
    assert alive == [0, 0, 0]
    assert not any(reference() is not None for reference in seen)


def test_mixed_weights_follow_their_masters():
    model = mlp()
    start = copy.deepcopy(model)
    state, options = compressed(model, magnitude_masks(model, 0.5, 1), mixed=True)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16, torch.float32}
    for inputs, targets in batches(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(inputs)
        F.cross_entropy(outputs.float(), targets).backward()
        state.step(options, None)
    for layer in state.layers:
        assert torch.equal(layer.weight.reshape(-1)[layer.index.long()], layer.master.to(torch.bfloat16))
        moved = (layer.dense() - start.get_parameter(layer.name)).reshape(-1)[layer.index.long()]
        assert float(moved.detach().abs().max()) == pytest.approx(0.03, rel=0.2), "three steps of Adam"


def test_a_state_can_be_written_and_taken_up_and_inherited():
    model = mlp()
    masks = magnitude_masks(model, 0.8, 1)
    dense, options = compressed(model, {})
    for inputs, targets in batches(2):
        F.cross_entropy(model(inputs), targets).backward()
        dense.step(options, None)
    moments = dense.optimizer.optimizer.state[model[0].weight]["exp_avg"]
    dense.close()
    state, _ = compressed(model, masks)
    state.inherit(dense)
    kept = state.layers[0].optimizer.state[state.layers[0].master]
    assert torch.equal(kept["exp_avg"], moments.reshape(-1)[masks["0.weight"].long()])
    assert float(kept["step"]) == 2
    other_model = mlp()
    other, _ = compressed(other_model, masks)
    other.restore(copy.deepcopy(state.state()))
    inputs, targets = batches(1)[0]
    for one, its in ((model, state), (other_model, other)):
        F.cross_entropy(one(inputs), targets).backward()
        its.step(options, None)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other_model.parameters(), strict=True))
