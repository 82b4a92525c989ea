"""What of a model can be dealt out to subnets: groups of neurons, filters, heads or blocks, and where they lie.

A group has `width` members, of which each subnet of a round gets some and no two get the same. A `Cut` says where
the members of a group lie in a parameter. What no group cuts belongs to all subnets. Plain data: no tensors, no
modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Cut:
    """Where the members of a group lie along one dimension of a parameter or buffer.

    The dimension is made of `outer` x width x `inner`: a neuron is one row (1 x width x 1), a filter that is flattened
    is `inner` columns, a head is `inner` rows in each of the `outer` parts for queries, keys and values.
    """

    parameter: str
    dim: int
    outer: int = 1
    inner: int = 1
    scaled: bool = False
    """Whether it sums over the group, with nothing after it that normalises: all members together give it as many times
    more as there are subnets, so that in use it is divided by their number."""

    def index(self, members: torch.Tensor, width: int) -> torch.Tensor:
        """The places of these members along the dimension."""
        outer = torch.arange(self.outer).view(-1, 1, 1) * (width * self.inner)
        return (outer + members.view(1, -1, 1) * self.inner + torch.arange(self.inner)).flatten()


@dataclass(frozen=True)
class Group:
    """Members that are dealt out. Those of kind `blocks` are whole modules; the others are places in parameters."""

    name: str
    kind: str
    """`neurons`, `filters`, `heads` or `blocks`."""
    width: int
    cuts: tuple[Cut, ...] = ()
    modules: tuple[str, ...] = ()
    """Of blocks: their names, in order."""
    ends: tuple[str, ...] = ()
    """Of blocks: the parameters that end a branch, which in use are divided by the number of subnets."""


@dataclass(frozen=True)
class Structure:
    """All groups of a model; none where everything is shared."""

    groups: tuple[Group, ...] = ()

    def cuts_of(self, parameter: str) -> list[tuple[Group, Cut]]:
        """The cuts of a parameter or buffer, by dimension."""
        return self._cuts.get(parameter, [])

    def block_of(self, parameter: str) -> tuple[Group, int] | None:
        """The block that a parameter belongs to, as its group and its place in it."""
        parts = parameter.split(".")
        for end in range(1, len(parts)):
            found = self._blocks.get(".".join(parts[:end]))
            if found is not None:
                return found
        return None

    def is_shared(self, parameter: str) -> bool:
        """Whether every subnet has all of it."""
        return not self.cuts_of(parameter) and self.block_of(parameter) is None

    def kinds(self) -> dict[str, int]:
        """How many members of each kind there are."""
        found: dict[str, int] = {}
        for group in self.groups:
            found[group.kind] = found.get(group.kind, 0) + group.width
        return found

    def block_groups(self) -> Iterator[Group]:
        return (group for group in self.groups if group.modules)

    @cached_property
    def _cuts(self) -> dict[str, list[tuple[Group, Cut]]]:
        found: dict[str, list[tuple[Group, Cut]]] = {}
        for group in self.groups:
            for cut in group.cuts:
                found.setdefault(cut.parameter, []).append((group, cut))
        for cuts in found.values():
            cuts.sort(key=lambda each: each[1].dim)
        return found

    @cached_property
    def _blocks(self) -> dict[str, tuple[Group, int]]:
        return {name: (group, i) for group in self.block_groups() for i, name in enumerate(group.modules)}
