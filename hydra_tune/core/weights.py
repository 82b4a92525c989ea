"""Trained weights on disk as safetensors files, written atomically. No pickle is read."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.parameter import is_lazy

from hydra_tune.core.errors import InputError, NoRoom


def save_weights(model: nn.Module, path: Path) -> None:
    """Write the model's parameters and buffers (tied tensors once) atomically, so that `path` is always complete."""
    unfinished = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(_stored(model), str(unfinished))
        with open(unfinished, "rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        size = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
        raise NoRoom(
            f"weights of {size} bytes cannot be written to {path} ({error})",
            "make room there and resume the study; the trial goes on from its checkpoint",
        ) from error


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a file from `save_weights` into a model of the same architecture."""
    try:
        stored = load_file(path)
    except FileNotFoundError as error:
        raise InputError(f"there are no weights at {path}", "run the search again, or choose another trial") from error
    except Exception as error:
        raise InputError(
            f"{path} is not a safetensors file of this model ({error})", "export the trial again"
        ) from error
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor) and name in stored:  # of a lazy module
            tensor.materialize(stored[name].shape)
    own = _tensors(model)
    first = _first_names(own)
    wrong = sorted(
        (stored.keys() - own.keys()) | {name for name, tied in first.items() if not {name, tied} & stored.keys()}
    )
    wrong += [name for name, tensor in stored.items() if name in own and tensor.shape != _plain(own[name]).shape]
    if wrong:
        raise InputError(
            f"{path} does not fit the model: {', '.join(wrong[:3])} differ",
            "build must make the same model for the same parameters",
        )
    with torch.no_grad():
        for name, tensor in stored.items():
            _plain(own[name]).copy_(tensor)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by all their names; extra state of modules is no tensor."""
    return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}


def _stored(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors to write: a tied one once, each with memory of its own, a complex one as pairs of numbers."""
    own = _tensors(model)
    found = {name: _plain(own[name]) for name, first in _first_names(own).items() if name == first}
    return {
        name: tensor.contiguous() if _fills_its_storage(tensor) else tensor.contiguous().clone()
        for name, tensor in found.items()
    }


def _first_names(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """For each name, the first name of the same tensor."""
    first: dict[object, str] = {}
    found = {}
    for name, tensor in tensors.items():
        same = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype) if tensor.numel() else name
        found[name] = first.setdefault(same, name)
    return found


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as it is stored: safetensors has no type for complex numbers of double precision."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
