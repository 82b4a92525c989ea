"""Deals groups out to subnets, takes a subnet's part of a tensor and puts it back. Pure functions.

In every round each group is shuffled and dealt in nearly equal parts, determined by the trial's seed and the round.
Parts are disjoint, so putting them back needs no averaging; tensors without a cut are averaged over the subnets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch

from hydra_tune.strategies.subnets.structure import Structure

Dealt: TypeAlias = Mapping[str, torch.Tensor]
"""One subnet's members of each group, ascending."""


def deal(structure: Structure, subnets: int, seed: int, turn: int) -> tuple[Dealt, ...]:
    """Deal each group's members out to `subnets` for round `turn`."""
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(subnets)]
    for group in structure.groups:
        digest = hashlib.blake2b(f"{seed}/{turn}/{group.name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
        shuffled = torch.randperm(group.width, generator=generator)
        for part, members in zip(parts, shuffled.tensor_split(subnets), strict=True):
            part[group.name] = members.sort().values
    return tuple(parts)


def take(structure: Structure, dealt: Dealt, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a subnet's part of a parameter, buffer or optimizer tensor of that shape; None if it has none."""
    block = structure.block_of(name)
    if block is not None and not _has(dealt[block[0].name], block[1]):
        return None
    part = tensor
    for dim, index in _places(structure, dealt, name):
        part = part.index_select(dim, index)
    return part.clone() if part is tensor else part


def put(structure: Structure, dealt: Dealt, name: str, tensor: torch.Tensor, part: torch.Tensor) -> None:
    """Put a subnet's part back into the whole tensor; other entries stay unchanged."""
    _put(tensor, part, _places(structure, dealt, name))


def _put(tensor: torch.Tensor, part: torch.Tensor, places: Sequence[tuple[int, torch.Tensor]]) -> None:
    if not places:
        tensor.copy_(part)
        return
    (dim, index), *others = places
    if others:
        rows = tensor.index_select(dim, index)
        _put(rows, part, others)
        part = rows
    tensor.index_copy_(dim, index, part.to(tensor.dtype))


def mean(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the average of a shared tensor over the subnets; for counters, the maximum."""
    found = list(parts)
    if len(found) == 1:
        return found[0]
    stacked = torch.stack(found)
    return stacked.mean(0) if stacked.is_floating_point() or stacked.is_complex() else stacked.amax(0)


def in_use(structure: Structure, subnets: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights with which all members together act as they did in their subnets.

    A parameter that sums over a dealt group is divided by the number of subnets, since it now sums over all of them.
    """
    found = dict(tensors)
    if subnets > 1:
        for group in structure.groups:
            for name in [*(cut.parameter for cut in group.cuts if cut.scaled), *group.ends]:
                found[name] = found[name] / subnets
    return found


def _places(structure: Structure, dealt: Dealt, name: str) -> list[tuple[int, torch.Tensor]]:
    cuts = structure.cuts_of(name)
    return [(cut.dim, cut.index(dealt[group.name], group.width)) for group, cut in cuts if group.name in dealt]


def _has(members: torch.Tensor, member: int) -> bool:
    return bool((members == member).any())
