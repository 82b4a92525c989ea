"""Finds where to cut a model: the fewest contiguous shards that fit a device, and of those the best balanced.

Hydra cuts greedily, filling the device and rolling back (arXiv 2107.06469). That is not always the fewest, because what
a shard takes does not grow evenly with its length: a cut may fall where little crosses it, or where a residual link and
a wide layer do. Here dynamic programming over the possible cuts finds the optimum. It works on whole rows of ranges
that end at one cut, with numpy, and leaves out ranges whose state alone is too large.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hydra_tune.core.devices import format_bytes
from hydra_tune.core.errors import Infeasible
from hydra_tune.graph.costs import NodeCost, ShardCost, shard_cost

MIB = 2**20
ROUNDING = 1 + 1e-9
"""Factor within which two sums of seconds count as equal: sums over the same nodes differ in their last digits."""
_UNREACHED = 2**62

Integers: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Partition:
    """A model cut into shards, in execution order."""

    shards: tuple[ShardCost, ...]

    @property
    def cuts(self) -> tuple[int, ...]:
        """Indices of the nodes before which there is a cut."""
        return tuple(shard.start for shard in self.shards[1:])

    @property
    def device_bytes(self) -> int:
        """Bytes that the largest shard takes on a device."""
        return max(shard.device_bytes for shard in self.shards)


def partition(
    nodes: Sequence[NodeCost],
    budget: int,
    *,
    input_bytes: int = 0,
    transfer_fraction: float = 0.1,
    deferred: bool = False,
) -> Partition:
    """Return the fewest shards that fit, then the least seconds of the slowest, then the most preferred cuts.

    Raises Infeasible where nothing fits. `transfer_fraction` of the budget stays free for the shard that is brought in
    while another one computes; `input_bytes` is the batch, which the first shard takes in.
    """
    room = _room(budget, transfer_fraction)
    ranges = _Ranges(nodes, input_bytes, deferred)
    starts, slowest = _fewest(ranges, room)
    if not starts[-1].size:
        raise _infeasible(ranges, budget, room, transfer_fraction)
    return Partition(tuple(ranges.shard(i, j) for i, j in _best_cuts(ranges, starts, slowest)))


def smallest_budget(
    nodes: Sequence[NodeCost], *, input_bytes: int = 0, transfer_fraction: float = 0.1, deferred: bool = False
) -> int:
    """Return the smallest budget, in bytes of whole MiB, with which `partition` succeeds."""
    needed = _bottleneck(_Ranges(nodes, input_bytes, deferred)).device_bytes
    return _budget_for(needed, transfer_fraction)


class _Ranges:
    """Costs of every range between two possible cuts. Point k is the k-th possible cut; point 0 is the beginning."""

    def __init__(self, nodes: Sequence[NodeCost], input_bytes: int, deferred: bool) -> None:
        if not nodes:
            raise ValueError("a model without nodes cannot be cut")
        self.nodes, self.input_bytes, self.deferred = nodes, input_bytes, deferred
        inner = [i + 1 for i, node in enumerate(nodes[:-1]) if node.cut_allowed]
        self.points = [0, *inner, len(nodes)]
        begin, end = np.array(self.points[:-1]), np.array(self.points[1:])
        kept = [n.state_bytes - (0 if deferred else n.gradient_bytes) + n.activation_bytes for n in nodes]
        self.held: Integers = np.cumsum([0, *kept], dtype=np.int64)[[0, *end]]
        self.seconds: Floats = np.cumsum([0.0, *(node.seconds for node in nodes)])[[0, *end]]
        crossing: Integers = np.array([node.boundary_bytes for node in nodes], dtype=np.int64)[end - 1]
        self.out: Integers = np.concatenate([[0], crossing])
        already = np.array([nodes[start].saved_input_bytes for start in begin] + [0], dtype=np.int64)
        self.into: Integers = self.out - np.minimum(self.out, already)
        self.into[0] = input_bytes
        peaks = np.array([max(node.forward_peak_bytes, node.backward_peak_bytes) for node in nodes], dtype=np.int64)
        largest = np.array([0 if deferred else node.largest_parameter_bytes for node in nodes], dtype=np.int64)
        self.peak: Integers = np.maximum.reduceat(peaks, begin)
        self.largest: Integers = np.maximum.reduceat(largest, begin)
        self.tied = _tied_steps(nodes, end, deferred)

    def __len__(self) -> int:
        return len(self.points) - 1

    def shard(self, start: int, stop: int) -> ShardCost:
        """Return the cost of the range between two points as a shard."""
        nodes = (self.points[start], self.points[stop])
        return shard_cost(self.nodes, *nodes, deferred=self.deferred, input_bytes=self.input_bytes)

    def rows(self, room: int) -> Iterator[tuple[int, int, Integers]]:
        """Yield for each point the first useful start, and the device bytes of each range from there on to the point.

        Running maxima and tied bytes are kept from row to row, so that a row is a handful of vector operations.
        """
        count = len(self)
        peak, largest, tied = (np.zeros(count, dtype=np.int64) for _ in range(3))
        firsts = np.searchsorted(self.held, self.held - room, side="left")
        for stop in range(1, count + 1):
            first = int(firsts[stop])
            np.maximum(peak[first:stop], self.peak[stop - 1], out=peak[first:stop])
            np.maximum(largest[first:stop], self.largest[stop - 1], out=largest[first:stop])
            for low, high, size in self.tied.get(stop, ()):
                tied[low:high] += size
            takes = self.into[first:stop] - self.held[first:stop]
            takes += peak[first:stop]
            takes += largest[first:stop]
            takes += tied[first:stop]
            takes += self.held[stop] + self.out[stop]
            yield stop, first, takes


def _tied_steps(nodes: Sequence[NodeCost], end: Integers, deferred: bool) -> dict[int, list[tuple[int, int, int]]]:
    """Return the bytes that tied parameters add to ranges: by stop, the first and last start and the bytes.

    A use whose owner stands before the range brings a copy and a gradient, once however many uses follow; the owner
    itself brings the gradient that its uses add to (which `deferred` counts with all others).
    """
    owners: dict[str, int] = {}
    uses: dict[str, list[int]] = defaultdict(list)
    sizes: dict[str, int] = {}
    steps: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for i, node in enumerate(nodes):
        group = int(np.searchsorted(end, i, side="right")) if node.tied or node.shared else 0
        sizes |= {**node.tied, **node.shared}
        owners |= dict.fromkeys(node.shared, group)
        for name in node.tied:
            uses[name].append(group)
    for name, size in sizes.items():
        low = 0
        if name in owners:
            low = owners[name] + 1
            steps[low].append((0, low, 0 if deferred else size))
        for group in uses[name]:
            steps[group + 1].append((low, group + 1, 2 * size))
            low = max(low, group + 1)
    return steps


def _fewest(ranges: _Ranges, room: int) -> tuple[list[Integers], Floats]:
    """Return for each point its last shard's starts that make the fewest shards, and the slowest shard's least seconds.

    One pass is exact for the balance too: on the way to the fewest shards of the whole model, each part before a cut
    has its own fewest; one more there could not be saved after it.
    """
    counts = np.full(len(ranges) + 1, _UNREACHED, dtype=np.int64)
    slowest = np.zeros(len(ranges) + 1)
    counts[0] = 0
    starts: list[Integers] = [np.zeros(0, dtype=np.int64)] * (len(ranges) + 1)
    for stop, first, takes in ranges.rows(room):
        if first == stop:
            continue
        reached = np.where(takes <= room, counts[first:stop], _UNREACHED)
        least = reached.min()
        if least == _UNREACHED:
            continue
        chosen = np.flatnonzero(reached == least) + first
        counts[stop] = least + 1
        slowest[stop] = np.maximum(slowest[chosen], ranges.seconds[stop] - ranges.seconds[chosen]).min()
        starts[stop] = chosen
    return starts, slowest


def _best_cuts(ranges: _Ranges, starts: list[Integers], slowest: Floats) -> list[tuple[int, int]]:
    """Return the balanced shards with the most preferred cuts, and among those with the fewest bytes across cuts."""
    limit = slowest[-1] * ROUNDING
    weight = 1 + int(ranges.out.sum())
    worth: Integers = np.full(len(ranges) + 1, -_UNREACHED, dtype=np.int64)
    worth[0] = 0
    before = [0] * (len(ranges) + 1)
    for stop in range(1, len(ranges) + 1):
        chosen = starts[stop]
        chosen = chosen[ranges.seconds[stop] - ranges.seconds[chosen] <= limit]
        if not chosen.size:
            continue
        best = int(chosen[worth[chosen].argmax()])
        if worth[best] > -_UNREACHED:
            preferred = weight if ranges.nodes[ranges.points[stop] - 1].preferred else 0
            worth[stop] = worth[best] + preferred - ranges.out[stop]
            before[stop] = best
    return _way(before)


def _way(before: list[int]) -> list[tuple[int, int]]:
    """Return the shards from the first point to the last; `before` has for each point the start of its last shard."""
    stop, shards = len(before) - 1, []
    while stop:
        shards.append((before[stop], stop))
        stop = before[stop]
    return shards[::-1]


def _bottleneck(ranges: _Ranges) -> ShardCost:
    """Return the largest shard of the cut whose largest shard is smallest: a device must hold at least that one."""
    enough = max(ranges.shard(i, i + 1).device_bytes for i in range(len(ranges)))  # every possible cut made
    least = np.full(len(ranges) + 1, _UNREACHED, dtype=np.int64)
    least[0] = 0
    before = [0] * (len(ranges) + 1)
    for stop, first, takes in ranges.rows(enough):
        if first == stop:
            continue
        largest = np.maximum(least[first:stop], takes)
        # The last of equals: the shortest shard says most about what is in the way.
        best = stop - 1 - int(largest[::-1].argmin())
        least[stop], before[stop] = largest[best - first], best
    return max((ranges.shard(i, j) for i, j in _way(before)), key=lambda shard: shard.device_bytes)


def _infeasible(ranges: _Ranges, budget: int, room: int, transfer_fraction: float) -> Infeasible:
    worst = _bottleneck(ranges)
    first, last = ranges.nodes[worst.start].name, ranges.nodes[worst.stop - 1].name
    what = f"node {last!r} needs" if worst.stop - worst.start == 1 else f"nodes {first!r} to {last!r} need"
    enough = _budget_for(worst.device_bytes, transfer_fraction)
    return Infeasible(
        f"{what} {format_bytes(worst.device_bytes)} on a device, where a shard may take {format_bytes(room)} "
        f"of {format_bytes(budget)}",
        f"the smallest device_memory for this model is {enough // MIB}MiB",
        node=last,
        needed_bytes=worst.device_bytes,
        smallest_budget=enough,
    )


def _room(budget: int, transfer_fraction: float) -> int:
    """Return the bytes of a budget that a shard may take."""
    if not 0 <= transfer_fraction < 1:
        raise ValueError(f"transfer_fraction cannot be {transfer_fraction}")
    return int(budget * (1 - transfer_fraction))


def _budget_for(needed: int, transfer_fraction: float) -> int:
    """Return the smallest budget, in bytes of whole MiB, of which a shard may take `needed` bytes or more."""
    count = max(1, math.floor(needed / (1 - transfer_fraction) / MIB))
    while _room(count * MIB, transfer_fraction) < needed:
        count += 1
    return count * MIB
