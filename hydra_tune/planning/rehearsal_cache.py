"""Rehearsals on disk, by all that they depend on: trials and runs that differ in their rates alone rehearse once.

A model is known by its modules, their code, the numbers they keep, its tensors and the shapes of a batch. It is not
recorded for that, as profiles are, since recording takes longer than a rehearsal of a small model.
"""

from __future__ import annotations

import functools
import types
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hydra_tune.batches import Batches
from hydra_tune.builds import Prepared
from hydra_tune.graph.profile_cache import profile_key
from hydra_tune.measurements import keep, kept
from hydra_tune.planning.rehearsal import Rehearsal, rehearse
from hydra_tune.shards.prepare import name_of, shapes_of

FUNCTIONS = (types.FunctionType, functools.partial)
LIBRARIES = str(Path(torch.__file__).parent)
PLAIN = (bool, int, float, str, tuple, list, type(None))


def rehearsed(prepared: Prepared, batches: Batches, seed: int, device: torch.device, cache: Path) -> Rehearsal:
    """What was measured of such a candidate before, or is now."""
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
    """What user code does, as far as it can be seen: methods of its classes, functions, and those that they call."""
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
    """Functions that it calls by name or has closed over."""
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    closed = [cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell)]
    return [thing for thing in (*named, *closed) if isinstance(thing, FUNCTIONS)]


def _is_empty(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - asking is the only way to know
    except ValueError:
        return True
    return False


def _is_library(thing: Any) -> bool:
    """Whether it comes with torch, whose version is in the key, or is built into Python."""
    if isinstance(thing, functools.partial):
        return False
    if isinstance(thing, types.FunctionType):
        thing = thing.__code__
    if isinstance(thing, types.CodeType):
        return thing.co_filename.startswith(LIBRARIES)
    return str(thing.__module__).split(".")[0] in ("torch", "builtins")


def _attributes(model: nn.Module) -> list[Any]:
    """Numbers and words that modules keep, such as how many heads they have."""
    return [
        (name, sorted((key, repr(value)) for key, value in vars(module).items() if isinstance(value, PLAIN)))
        for name, module in model.named_modules()
    ]


def _optimizer(optimizer: torch.optim.Optimizer) -> Any:
    """Its class and its switches, not its rates."""
    switches = [
        sorted((key, str(value)) for key, value in group.items() if isinstance(value, bool | str) or value is None)
        for group in optimizer.param_groups
    ]
    momentum = [bool(group.get("momentum")) for group in optimizer.param_groups]
    return type(optimizer).__qualname__, switches, momentum, [len(group["params"]) for group in optimizer.param_groups]
