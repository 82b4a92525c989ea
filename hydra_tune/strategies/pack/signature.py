"""The signature of a candidate: candidates with equal signatures can be members of one pack.

It covers everything that shapes the computation: modules and their attributes, shapes, the loss, the batch size, the
kind of optimizer. Numbers that may differ from member to member are left out: those of the optimizer, dropout
probabilities, label smoothing, schedules, clipping norms, epochs and seeds.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hydra_tune.strategies.pack.optimizers import kind_of
from hydra_tune.strategies.pack.refusal import CannotPack
from hydra_tune.training.loop import Training, modules_with_extra_state

NOT_STACKED = (nn.RNNBase, nn.RNNCellBase)
"""Modules whose kernels have no batched form: LSTM, GRU and RNN."""
HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_OWN_OF_MODULES = frozenset(vars(nn.Module()))
DEEPEST = 12
"""Levels of nested values that are compared."""


def signature(training: Training) -> str:
    """Return the digest of a candidate's signature. Raises CannotPack with the reason."""
    model, candidate = training.model, training.candidate
    _refuse_model(model)
    parts = (
        [(name, *_module(module)) for name, module in model.named_modules()],
        [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()],
        _names_of_tied(model),
        [(name, tuple(b.shape), str(b.dtype)) for name, b in model.named_buffers()],
        described(candidate.loss),
        (training.batches.size, training.data_shape(), candidate.accumulate, candidate.clip_grad_norm is not None),
        kind_of(training.optimizer, model).signature,
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def may_differ(module: nn.Module, attribute: str, value: object) -> bool:
    """True for a number that may differ from member to member: a dropout probability, or a loss's label smoothing."""
    if not isinstance(value, float | int) or isinstance(value, bool):
        return False
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return attribute == "p"
    return "drop" in attribute or attribute == "label_smoothing"


def _refuse_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        if isinstance(module, NOT_STACKED):
            raise CannotPack(f"{where} is a {type(module).__name__}, which has no batched form")
        if any(getattr(module, hooks, None) for hooks in HOOKS):
            raise CannotPack(f"{where} has hooks")
        if isinstance(module, nn.Embedding) and (module.sparse or module.max_norm is not None):
            raise CannotPack(f"{where} is an embedding with sparse gradients or a max_norm")
    if modules_with_extra_state(model):
        raise CannotPack("a module keeps extra state")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.layout is not torch.strided or type(tensor) not in (torch.Tensor, nn.Parameter):
            raise CannotPack(f"{name!r} is a {type(tensor).__name__} of layout {tensor.layout}")
        if getattr(tensor, "_post_accumulate_grad_hooks", None) or tensor._backward_hooks:
            raise CannotPack(f"{name!r} has a hook")


def _module(module: nn.Module) -> tuple[Any, ...]:
    """Describe a module's class and its own attributes, without its tensors and submodules."""
    own = {
        name: "may differ" if may_differ(module, name, value) else described(value)
        for name, value in sorted(vars(module).items())
        if name not in _OWN_OF_MODULES
    }
    return _name_of(type(module)), own


def _names_of_tied(model: nn.Module) -> list[tuple[str, str]]:
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return [(name, first[id(p)]) for name, p in named if first.setdefault(id(p), name) != name]


def described(value: Any, depth: int = 0) -> Any:
    """Return plain data that is equal for equivalent values. Raises CannotPack for a value that cannot be compared."""
    if depth > DEEPEST:
        raise CannotPack("its values are nested too deeply to be compared")
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return (type(value).__name__, repr(value))
    if isinstance(value, torch.dtype | torch.device | torch.Size):
        return str(value)
    if isinstance(value, torch.Tensor):
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return ("tensor", tuple(value.shape), str(value.dtype), hashlib.blake2b(content, digest_size=16).hexdigest())
    if isinstance(value, type):
        return _name_of(value)
    if isinstance(value, nn.Module):
        return [(name, *_module(module), *_tensors(module)) for name, module in value.named_modules()]
    return _compound(value, depth + 1)


def _compound(value: Any, depth: int) -> Any:
    if isinstance(value, Mapping):
        return (_name_of(type(value)), [(described(k, depth), described(v, depth)) for k, v in value.items()])
    if isinstance(value, list | tuple):
        return (_name_of(type(value)), [described(each, depth) for each in value])
    if isinstance(value, set | frozenset):
        return (_name_of(type(value)), sorted(repr(described(each, depth)) for each in value))
    if isinstance(value, functools.partial):
        free = {k: "may differ" if k == "label_smoothing" else described(v, depth) for k, v in value.keywords.items()}
        return ("partial", described(value.func, depth), described(value.args, depth), sorted(free.items()))
    if isinstance(value, types.MethodType):
        return ("method", described(value.__func__, depth), described(value.__self__, depth))
    if isinstance(value, types.FunctionType):
        return _function(value, depth)
    if isinstance(value, types.BuiltinFunctionType | types.ModuleType):
        return ("named", getattr(value, "__module__", ""), value.__name__)
    raise CannotPack(f"it keeps a {_name_of(type(value))}, which cannot be compared")


def _function(function: types.FunctionType, depth: int) -> Any:
    """Describe a function by its code and what it has closed over; functions of torch by their names."""
    if (function.__module__ or "").startswith("torch."):
        return ("named", function.__module__, function.__qualname__)
    cells = [described(cell.cell_contents, depth) for cell in function.__closure__ or ()]
    defaults = described(function.__defaults__, depth), described(function.__kwdefaults__, depth)
    return ("function", function.__module__, function.__qualname__, _code(function.__code__), cells, defaults)


def _code(code: types.CodeType) -> Any:
    constants = [_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return (code.co_code.hex(), constants, code.co_names)


def _tensors(module: nn.Module) -> Iterator[Any]:
    named = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return (described(tensor.detach()) for _name, tensor in named)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
