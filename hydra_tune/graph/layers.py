"""Modules that a recording calls as a whole, and layers of other packages that are known here."""

from __future__ import annotations

import torch
from torch import nn

_OPEN = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)
"""torch's modules that only call others: recorded inside."""


def is_leaf(module: nn.Module) -> bool:
    """True if a module is called as a whole: torch's own layers, compiled ones, and those with backward hooks."""
    if isinstance(module, torch.jit.ScriptModule) or is_conv1d(module) or is_activation(module):
        return True
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    home = type(module).__module__
    torchs = home.startswith(("torch.nn", "torch.ao.nn", "torch._dynamo"))
    return torchs and not isinstance(module, _OPEN)


def is_conv1d(module: nn.Module) -> bool:
    """True for the dense layer of transformers' GPT-2, `Conv1D`: its weight is that of `nn.Linear`, transposed."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def is_activation(module: nn.Module) -> bool:
    """True for one of transformers' activation functions, which compute each number by itself."""
    return type(module).__module__ == "transformers.activations" and not any(True for _ in module.children())
