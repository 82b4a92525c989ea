"""State that modules keep besides parameters and buffers, for a trial that moves from one worker to another.

That is what `get_extra_state` gives, and plain attributes that a forward changes: counters, running numbers, small
tensors that are no buffers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hydra_tune.training.loop import modules_with_extra_state

PLAIN = (bool, int, float, str, type(None))
LARGEST = 1 << 20
"""Bytes from which a tensor in an attribute is taken for a cache, which is made again."""


class ModuleState:
    """Attributes of a model's modules in one worker."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._first = self._plain()
        """Attributes at the time when the model arrived in this worker."""
        self._hooks = _number_of_hooks(model)

    def changed(self) -> dict[str, dict[str, Any]]:
        """Return the attributes that training has changed, by module.

        Where the forward has set hooks, attributes that are new say so: another worker's forward makes both itself.
        """
        found: dict[str, dict[str, Any]] = {}
        hooked = _number_of_hooks(self._model) != self._hooks
        for (module, name), value in self._plain().items():
            if hooked and (module, name) not in self._first:
                continue
            if (module, name) not in self._first or not _same(self._first[module, name], value):
                found.setdefault(module, {})[name] = value
        return found

    def extra(self) -> dict[str, Any]:
        """Return the extra state of each module that has some, by module."""
        return {name: module.get_extra_state() for name, module in modules_with_extra_state(self._model)}

    def restore(self, changed: dict[str, dict[str, Any]], extra: dict[str, Any]) -> None:
        """Set the attributes and extra state that the modules had at the last commit."""
        wanted = dict(self._first)
        wanted |= {(module, name): value for module, named in changed.items() for name, value in named.items()}
        for (path, name), value in wanted.items():
            module = self._model.get_submodule(path)
            present = vars(module).get(name)
            if _same(present, value):
                continue
            if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor) and present.shape == value.shape:
                present.copy_(value)  # others may refer to the same tensor
            else:
                setattr(module, name, _copied(value))
        for path, stateful in modules_with_extra_state(self._model):
            if path in extra:
                stateful.set_extra_state(extra[path])

    def _plain(self) -> dict[tuple[str, str], Any]:
        return {
            (name, attribute): _copied(value)
            for name, module in self._model.named_modules()
            for attribute, value in vars(module).items()
            if attribute != "training" and _can_be_kept(value)
        }


def _number_of_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def _can_be_kept(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        small = value.numel() * value.element_size() <= LARGEST
        return small and value.layout is torch.strided and not value.requires_grad
    return type(value) in PLAIN


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and bool(torch.equal(one, other))
    return type(one) is type(other) and bool(one == other)
