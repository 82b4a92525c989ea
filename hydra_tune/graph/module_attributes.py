"""Attributes of a model's modules, with their hooks: which are other objects than before, and how to put them back.

Some models set hooks in their first forward, and note in an attribute that they have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

Attributes = dict[str, list[dict[Any, Any]]]


def attributes_of(model: nn.Module) -> Attributes:
    """Return the attributes, parameters, buffers and hooks that each module has now, by the module's name."""
    return {
        name: [dict(each) for each in _dictionaries(module)]
        for name, module in model.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)
    }


def changed_attributes(model: nn.Module, before: Attributes) -> Iterator[tuple[str, list[str]]]:
    """Yield each module with attributes that are other objects than before, and the names of those attributes."""
    for module, was in before.items():
        changed = set()
        for now, then in zip(_dictionaries(model.get_submodule(module)), was, strict=True):
            changed |= {
                key if isinstance(key, str) else "its hooks"
                for key in now.keys() | then.keys()
                if now.get(key) is not then.get(key)
            }
        if changed:
            yield module, sorted(changed)


def restore_attributes(model: nn.Module, before: Attributes) -> None:
    """Restore the attributes that `attributes_of` returned."""
    for module, was in before.items():
        for now, then in zip(_dictionaries(model.get_submodule(module)), was, strict=True):
            if any(now.get(key) is not then.get(key) for key in now.keys() | then.keys()):
                now.clear()
                now.update(then)


def _dictionaries(module: nn.Module) -> list[dict[Any, Any]]:
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    options = (
        module._forward_pre_hooks_with_kwargs, module._forward_hooks_with_kwargs, module._forward_hooks_always_called,
    )  # fmt: skip
    return [vars(module), module._parameters, module._buffers, *hooks, *options]
