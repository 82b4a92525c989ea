"""Makes a subnet's module: the user's own model, with fewer neurons, filters, heads or blocks in it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hydra_tune.core.moving import set_data
from hydra_tune.graph.layers import is_conv1d
from hydra_tune.strategies.subnets.attention import adapt_heads
from hydra_tune.strategies.subnets.deal import Dealt, take
from hydra_tune.strategies.subnets.heads import HasHeads, SomeHeads
from hydra_tune.strategies.subnets.structure import Structure


def subnet(skeleton: nn.Module, structure: Structure, dealt: Dealt, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return the subnet with its part of `tensors`, the whole model's tensors; `skeleton` is unchanged."""
    made = copy.deepcopy(skeleton)
    for group in structure.block_groups():
        present = set(dealt[group.name].tolist())
        for member, name in enumerate(group.modules):
            if member not in present:
                made.set_submodule(name, nn.Identity())
    own = {**dict(made.named_parameters()), **dict(made.named_buffers())}
    for name, tensor in own.items():
        part = take(structure, dealt, name, tensors[name].detach())
        assert part is not None, name
        # Replace the data, not the tensor, so that tied tensors stay tied.
        set_data(tensor, part)
    modules = dict(made.named_modules())
    for name, module in modules.items():
        _adapt(module, structure, dealt, name)
    return made


def _adapt(module: nn.Module, structure: Structure, dealt: Dealt, name: str) -> None:
    """Set a module's size attributes to its new shapes."""
    if name in dealt and isinstance(module, nn.MultiheadAttention):
        module.__class__ = SomeHeads
        module.num_heads = len(dealt[name])
    elif name in dealt and isinstance(module, HasHeads):
        module.keep_heads(len(dealt[name]))
    elif (group := structure.heads_of(name)) is not None:
        adapt_heads(module, group, len(dealt[name]))
    elif is_conv1d(module):
        dense: Any = module
        dense.nx, dense.nf = dense.weight.shape
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1:
        module.out_channels, module.in_channels = module.weight.shape[:2]
    elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and module.weight is not None:
        module.num_features = len(module.weight)
    elif isinstance(module, nn.LayerNorm) and structure.cuts_of(f"{name}.weight"):
        module.normalized_shape = tuple(module.weight.shape)
