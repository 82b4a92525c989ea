"""Rehearsals on disk, keyed by all inputs: trials and runs that differ only in their rates rehearse once.

The key covers a model's modules, their code, their plain attributes, its tensors and the shapes of a batch. The model
is not captured for it, unlike for profiles, since capturing takes longer than a rehearsal of a small model.
"""

from __future__ import annotations

import functools
import types
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hydra_tune.core.measurements import keep, kept
from hydra_tune.graph.profile_cache import profile_key
from hydra_tune.planner.rehearsal import rehearse
from hydra_tune.strategies.estimate import Rehearsal
from hydra_tune.strategies.shard.prepare import name_of, shapes_of
from hydra_tune.training.batches import Batches
from hydra_tune.training.prepared import Prepared

FUNCTIONS = (types.FunctionType, functools.partial)
LIBRARIES = str(Path(torch.__file__).parent)
PLAIN = (bool, int, float, str, tuple, list, type(None))


def rehearsed(prepared: Prepared, batches: Batches, seed: int, device: torch.device, cache: Path) -> Rehearsal:
    """Return the stored rehearsal of an equal candidate, or rehearse and store it."""
    path = cache / f"rehearsal-{_key(prepared, batches)}.json"
    stored = kept(path)
    if stored is not None and stored.keys() == {field.name for field in fields(Rehearsal)}:
        return Rehearsal(**stored)
    found = rehearse(prepared, seed, device)
    keep(path, asdict(found))
    return found


def _key(prepared: Prepared, batches: Batches) -> str:
    candidate, model = prepared.candidate, prepared.candidate.model
    tensors = [(n, tuple(t.shape), str(t.dtype), t.requires_grad) for n, t in model.named_parameters()]
    buffers = [(n, tuple(t.shape), str(t.dtype)) for n, t in model.named_buffers()]
    data = type(prepared.train).__qualname__, type(prepared.valid).__qualname__
    steps = candidate.accumulate, candidate.clip_grad_norm is None, candidate.schedule_every, sorted(candidate.metrics)
    return profile_key(
        repr(model), _code(*{type(module) for module in model.modules()}, candidate.loss, *candidate.metrics.values()),
        _attributes(model), tensors, buffers, shapes_of(batches.fetch(0, 0)), data, steps,
        name_of(candidate.loss), _optimizer(candidate.optimizer(list(model.parameters()))), torch.get_num_threads(),
    )  # fmt: skip


def _code(*things: Any) -> list[Any]:
    """Return the visible code of user objects: methods of classes, functions, and the functions they call."""
    found: dict[Any, tuple[str, ...]] = {}
    waiting = list(things)
    while waiting:
        thing = waiting.pop()
        if not isinstance(thing, (type, types.CodeType, *FUNCTIONS)):
            thing = type(thing)
        if thing in found or _is_library(thing):
            continue
        match thing:
            case functools.partial():
                given = (*thing.args, *thing.keywords.values())
                found[thing] = ("partial", repr([each for each in given if isinstance(each, PLAIN)]))
                waiting += [thing.func, *given]
            case types.FunctionType():
                found[thing] = (thing.__qualname__, repr(thing.__defaults__))
                waiting += [thing.__code__, *_reached(thing)]
            case types.CodeType():
                plain = repr([const for const in thing.co_consts if isinstance(const, PLAIN)])
                found[thing] = (thing.co_qualname, thing.co_code.hex(), repr(thing.co_names), plain)
                waiting += [const for const in thing.co_consts if isinstance(const, types.CodeType)]
            case _:
                found[thing] = (thing.__qualname__,)
                waiting += [*thing.__bases__, *(each for each in vars(thing).values() if isinstance(each, FUNCTIONS))]
    return sorted(found.values())


def _reached(function: types.FunctionType) -> list[Any]:
    """Return the functions that a function calls by name or closes over."""
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    closed = [cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell)]
    return [thing for thing in (*named, *closed) if isinstance(thing, FUNCTIONS)]


def _is_empty(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents  # raises for an empty cell
    except ValueError:
        return True
    return False


def _is_library(thing: Any) -> bool:
    """True if `thing` belongs to torch, whose version is in the key, or is built into Python."""
    if isinstance(thing, functools.partial):
        return False
    if isinstance(thing, types.FunctionType):
        thing = thing.__code__
    if isinstance(thing, types.CodeType):
        return thing.co_filename.startswith(LIBRARIES)
    return str(thing.__module__).split(".")[0] in ("torch", "builtins")


def _attributes(model: nn.Module) -> list[Any]:
    """Return the plain attributes of modules, such as the number of heads."""
    return [
        (name, sorted((key, repr(value)) for key, value in vars(module).items() if isinstance(value, PLAIN)))
        for name, module in model.named_modules()
    ]


def _optimizer(optimizer: torch.optim.Optimizer) -> Any:
    """Return the optimizer's class and switches, without its rates."""
    switches = [
        sorted((key, str(value)) for key, value in group.items() if isinstance(value, bool | str) or value is None)
        for group in optimizer.param_groups
    ]
    momentum = [bool(group.get("momentum")) for group in optimizer.param_groups]
    return type(optimizer).__qualname__, switches, momentum, [len(group["params"]) for group in optimizer.param_groups]
