"""Finds the residual blocks that can be left out: those that are the identity if their branch is zero.

ResIST (arXiv 2107.00961) deals a residual net out by depth: each subnet has some of the blocks, and skips the others. A
block is one module that takes one value, adds a branch of convolutions to it and returns the same shape; a run on a
pilot batch, with the branch's last layer set to zero, confirms that the block is then the identity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hydra_tune.core.trees import call_model
from hydra_tune.graph.capture import untouched
from hydra_tune.graph.program import Program, Ref
from hydra_tune.strategies.subnets.neurons import is_one_by_one, is_sum
from hydra_tune.strategies.subnets.structure import Group


def blocks(model: nn.Module, program: Program, pilot: Any) -> Group | None:
    """Return the blocks that can be dealt out; None if there are fewer than two."""
    found: dict[str, tuple[str, ...]] = {}
    for op in program.training:
        if is_sum(op):
            one, other = (each.value for each in op.args if isinstance(each, Ref))
            for shortcut, branch in ((one, other), (other, one)):
                candidate = _candidate(model, program, shortcut, branch)
                if candidate is not None and _is_identity(model, pilot, *candidate):
                    found[candidate[0]] = candidate[1]
    if len(found) < 2:
        return None
    ends = tuple(name for end in found.values() for name in end)
    return Group("blocks", "blocks", len(found), modules=tuple(found), ends=ends)


def _candidate(model: nn.Module, program: Program, shortcut: int, branch: int) -> tuple[str, tuple[str, ...]] | None:
    """Return the module around a sum of a value and a branch of that value, and the branch's last parameters.

    None if there is no such module.
    """
    first = len(program.inputs)
    shortcut = _before_identities(model, program, shortcut)
    inside: set[int] = set()
    waiting = [branch]
    while waiting:
        value = waiting.pop()
        if value in inside or value == shortcut:
            continue
        if value < first or value < shortcut:
            return None
        inside.add(value)
        waiting += program.training[value - first].refs()
    called = [str(op.target) for value in inside if (op := program.training[value - first]).kind == "module"]
    name = _common_module(called)
    if not name:
        return None
    module = model.get_submodule(name)
    used = {f"{path}.{own}" for path in called for own, _ in model.get_submodule(path).named_parameters()}
    if used != {f"{name}.{own}" for own, _ in module.named_parameters()}:
        return None
    if not any(isinstance(each, nn.Conv1d | nn.Conv2d | nn.Conv3d) for each in module.modules()):
        return None
    end = _end(model, program, branch)
    return (name, end) if end else None


def _before_identities(model: nn.Module, program: Program, value: int) -> int:
    """Return the value that a shortcut carries, skipping `nn.Identity` modules."""
    while value >= len(program.inputs):
        op = program.training[value - len(program.inputs)]
        if op.kind != "module" or not isinstance(model.get_submodule(str(op.target)), nn.Identity):
            break
        (value,) = op.refs()
    return value


def _common_module(names: list[str]) -> str:
    paths = [name.split(".")[:-1] for name in names]
    common: list[str] = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _end(model: nn.Module, program: Program, value: int) -> tuple[str, ...]:
    """Return the parameters of a branch's last layer, which scale its whole output."""
    while value >= len(program.inputs):
        op = program.training[value - len(program.inputs)]
        if op.kind != "module":
            return ()
        module = model.get_submodule(str(op.target))
        if not is_one_by_one(module):
            scales = isinstance(
                module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.Linear | nn.Conv1d | nn.Conv2d
            )
            return tuple(f"{op.target}.{own}" for own, _ in module.named_parameters()) if scales else ()
        # A final activation would not preserve a factor; dropout and identity do.
        if not isinstance(module, nn.Identity | nn.Dropout | nn.Dropout2d):
            return ()
        (value,) = op.refs()
    return ()


def _is_identity(model: nn.Module, pilot: Any, name: str, ends: tuple[str, ...]) -> bool:
    """True if the block returns its input when its branch is zero."""
    calls: list[tuple[Any, Any]] = []

    def seen(_module: nn.Module, given: Any, result: Any) -> None:
        calls.append((given, result))

    parameters = dict(model.named_parameters())
    kept = {end: parameters[end].detach().clone() for end in ends}
    handle = model.get_submodule(name).register_forward_hook(seen)
    modes = {module: module.training for module in model.modules()}
    try:
        with untouched(model), torch.no_grad():
            for end in ends:
                parameters[end].zero_()
            model.eval()
            call_model(model, pilot)
    finally:
        handle.remove()
        with torch.no_grad():
            for end, value in kept.items():
                parameters[end].copy_(value)
        for module, mode in modes.items():
            module.training = mode
    if len(calls) != 1 or len(calls[0][0]) != 1:
        return False
    (given,), result = calls[0]
    return isinstance(result, torch.Tensor) and given.shape == result.shape and bool(torch.equal(given, result))
