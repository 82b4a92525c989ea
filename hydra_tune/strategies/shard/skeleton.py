"""A model without its weights: parameters keep shape, type and device, and take no memory until they are attached.

A parameter that is not attached is one NaN, expanded to the parameter's shape. User code can read its shape; a
computation with it gives NaN instead of a plausible number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hydra_tune.core.errors import CandidateError
from hydra_tune.core.moving import move_module, set_data
from hydra_tune.core.tensor_memory import has_memory
from hydra_tune.graph.observe import node_modules
from hydra_tune.graph.own_tensors import OwnTensors


def placeholder(
    tensor: torch.Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """Return a tensor of the same shape that takes one element of memory, by default of the same dtype and device."""
    dtype, device = dtype or tensor.dtype, device or tensor.device
    if not tensor.numel():
        return tensor.detach().to(device, dtype, copy=True)
    number: float | bool = True
    if dtype.is_floating_point or dtype.is_complex:
        number = math.nan
    elif dtype is not torch.bool:
        number = torch.iinfo(dtype).max
    return torch.full((), number, dtype=dtype, device=device).expand(tensor.shape)


def empty_parameters(model: nn.Module) -> None:
    """Take the contents out of a model's parameters; buffers stay."""
    for parameter in model.parameters():
        parameter.data, parameter.grad = placeholder(parameter), None


def move_skeleton(model: nn.Module, device: torch.device) -> None:
    """Move a model without its weights to a device: `to` would make parameters there in their full size."""
    for parameter in model.parameters():
        set_data(parameter, placeholder(parameter, device=device))
    move_module(model, device)


def check_parameters(model: nn.Module) -> None:
    """Raise CandidateError for parameters that cannot lie in blocks of bytes."""
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise CandidateError(
                f"parameter {name!r} has no shape yet", "run the lazy model on a batch in build, or use strategy whole"
            )
        if parameter.layout is not torch.strided:
            raise CandidateError(f"parameter {name!r} is a sparse tensor", "use strategy whole")
    _check_memory(model)


def _check_memory(model: nn.Module) -> None:
    """Raise CandidateError where a parameter shares its memory with another tensor: in blocks they would be two."""
    own = OwnTensors(model.named_parameters())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    attributes = [
        (f"{path}.{name}".lstrip("."), value)
        for path, module in model.named_modules()
        for name, value in (*vars(module).items(), *module._buffers.items())
        if isinstance(value, torch.Tensor) and id(value) not in names
    ]
    earlier: set[str] = set()
    for name, tensor in [*model.named_parameters(), *attributes]:
        shared = [other for other in own.names(tensor) if other in earlier] if has_memory(tensor) else []
        earlier.add(name)
        if shared:
            raise CandidateError(
                f"{name!r} has the memory of parameter {shared[0]!r}, which shards would take apart",
                "make it the same parameter, or use strategy whole",
            )


class WatchedParameters(dict[str, Any]):
    """A module's own parameters; calls `on_access` at each access by name, so that the parameter can be attached."""

    def __init__(self, parameters: dict[str, Any], on_access: Callable[[nn.Parameter], None]) -> None:
        super().__init__(parameters)
        self._on_access = on_access

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._on_access(parameter)
        return parameter


def watch(model: nn.Module, on_access: Callable[[nn.Parameter], None]) -> None:
    """Call `on_access` before each access to a parameter as an attribute of its module."""
    for module in node_modules(model):
        module._parameters = WatchedParameters(module._parameters, on_access)
