"""The parts of a model that can be dealt out to subnets: groups of neurons, filters, heads or blocks.

A group has `width` members, which are divided among the subnets of a round. A `Cut` gives the positions of a group's
members in a parameter. Parameters without a cut belong to all subnets. Plain data: no tensors, no modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class Cut:
    """Positions of a group's members along one dimension of a parameter or buffer.

    The dimension is `outer` x width x `inner`: a neuron is one row (1 x width x 1), a flattened filter is `inner`
    columns, a head is `inner` rows in each of the `outer` parts for queries, keys and values.
    """

    parameter: str
    dim: int
    outer: int = 1
    inner: int = 1
    scaled: bool = False
    """True if the parameter sums over the group and no norm follows. In the whole model the sum is as many times larger
    as there are subnets, so the weights in use are divided by their number."""

    def index(self, members: torch.Tensor, width: int) -> torch.Tensor:
        """Return the positions of these members along the dimension."""
        outer = torch.arange(self.outer).view(-1, 1, 1) * (width * self.inner)
        return (outer + members.view(1, -1, 1) * self.inner + torch.arange(self.inner)).flatten()


@dataclass(frozen=True)
class Group:
    """Members that are dealt out: whole modules for kind `blocks`, otherwise positions in parameters."""

    name: str
    kind: str
    """`neurons`, `filters`, `heads` or `blocks`."""
    width: int
    cuts: tuple[Cut, ...] = ()
    modules: tuple[str, ...] = ()
    """For blocks: module names, in order."""
    ends: tuple[str, ...] = ()
    """For blocks: parameters that end a branch, which in use are divided by the number of subnets."""


@dataclass(frozen=True)
class Structure:
    """All groups of a model; empty if everything is shared."""

    groups: tuple[Group, ...] = ()

    def cuts_of(self, parameter: str) -> list[tuple[Group, Cut]]:
        """Return the cuts of a parameter or buffer, by dimension."""
        return self._cuts.get(parameter, [])

    def block_of(self, parameter: str) -> tuple[Group, int] | None:
        """Return the group and position of the block that a parameter belongs to, or None."""
        parts = parameter.split(".")
        for end in range(1, len(parts)):
            found = self._blocks.get(".".join(parts[:end]))
            if found is not None:
                return found
        return None

    def is_shared(self, parameter: str) -> bool:
        """True if every subnet has the whole parameter."""
        return not self.cuts_of(parameter) and self.block_of(parameter) is None

    def kinds(self) -> dict[str, int]:
        """Return the number of members of each kind."""
        found: dict[str, int] = {}
        for group in self.groups:
            found[group.kind] = found.get(group.kind, 0) + group.width
        return found

    def heads_of(self, module: str) -> Group | None:
        """Return the heads of an attention module, or None."""
        return next((group for group in self.groups if group.kind == "heads" and group.name == module), None)

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
