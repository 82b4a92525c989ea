"""Finds the shard of each module call, by comparing a forward's calls with those of the pilot batch.

After a detour (data-dependent routing, an early exit) the position is known again at the next call that the pilot batch
made too; until then calls count as in the last known shard.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from hydra_tune.graph.observe import ObservedNode


class Path:
    """Position of a forward among a model's nodes, updated with each module call."""

    def __init__(self, nodes: Sequence[ObservedNode], shard_of_node: Sequence[int]) -> None:
        calls = [(name, shard) for node, shard in zip(nodes, shard_of_node, strict=True) for name in node.calls]
        self._calls = [name for name, _ in calls]
        self._shards = [shard for _, shard in calls]
        self._positions: dict[str, list[int]] = {}
        for position, name in enumerate(self._calls):
            self._positions.setdefault(name, []).append(position)
        self.begin()

    def begin(self) -> None:
        """Go back to the beginning of the forward."""
        self._next = 1 if self._calls[:1] == [""] else 0
        self.shard = 0

    def call(self, module: str) -> int:
        """Advance to this call of a module, and return its shard."""
        if self._next < len(self._calls) and self._calls[self._next] == module:
            position = self._next
        else:
            known = self._positions.get(module)
            if known is None:
                return self.shard
            ahead = bisect.bisect_left(known, self._next)
            position = known[ahead] if ahead < len(known) else known[-1]
        self._next, self.shard = position + 1, self._shards[position]
        return self.shard


def shards_of_nodes(count: int, ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the shard of each of `count` nodes, for shards that are these ranges of nodes."""
    found = [0] * count
    for shard, (start, stop) in enumerate(ranges):
        found[start:stop] = [shard] * (stop - start)
    return found


def users_of(nodes: Sequence[ObservedNode], shard_of_node: Sequence[int]) -> Mapping[str, list[int]]:
    """Return for each parameter the shards whose nodes use it."""
    users: dict[str, list[int]] = {}
    for node, shard in zip(nodes, shard_of_node, strict=True):
        for name in node.parameters:
            if shard not in users.setdefault(name, []):
                users[name].append(shard)
    return users
