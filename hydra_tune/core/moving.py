"""Moves parameters and modules between devices, on any backend.

torch changes a tensor's device in place (`tensor.data = other`) only between the kinds of devices that it was built
with; with others, `Module.to` makes new parameters, and parameters that were one become two. Here tensors stay the
objects that they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Give a parameter or buffer this content, which may be on another device; it stays the same object."""
    if torch._has_compatible_shallow_copy_type(tensor, data):
        tensor.data = data
        return
    fresh = data.detach()
    if isinstance(tensor, nn.Parameter):
        fresh = nn.Parameter(fresh, requires_grad=tensor.requires_grad)
    swap: Any = torch.utils.swap_tensors
    swap(tensor, fresh)


def move_module(module: nn.Module, device: torch.device) -> nn.Module:
    """Move a module to a device, as `module.to(device)` does; parameters that are shared stay shared."""
    if _data_can_be_set_to(device):
        return module.to(device)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return module.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _data_can_be_set_to(device: torch.device) -> bool:
    if device.type == "cpu":
        return True
    return torch._has_compatible_shallow_copy_type(torch.empty(0), torch.empty(0, device=device))
