"""Rehearsals on disk, by all that they depend on: trials and runs that differ in their rates alone rehearse once.

A model is known by its modules, their code, the numbers they keep, its tensors and the shapes of a batch. It is not
recorded for that, as profiles are, since recording takes longer than a rehearsal of a small model.
"""

from __future__ import annotations

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
        repr(model), _code(model), _attributes(model), tensors, buffers, shapes_of(batches.fetch(0, 0)), data, steps,
        name_of(candidate.loss), _optimizer(candidate.optimizer(list(model.parameters()))), torch.get_num_threads(),
    )  # fmt: skip


def _code(model: nn.Module) -> list[Any]:
    """What the forwards of all kinds of modules do, as far as their code says so."""
    kinds = {type(module) for module in model.modules()}
    found = [(kind.__qualname__, getattr(kind.forward, "__code__", None)) for kind in kinds]
    return sorted(
        (name, code.co_code.hex(), repr(code.co_names), repr([c for c in code.co_consts if isinstance(c, PLAIN)]))
        for name, code in found
        if code is not None
    )


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
