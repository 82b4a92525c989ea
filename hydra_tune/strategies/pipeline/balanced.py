"""Divides a model into contiguous shares, one per device, so that the slowest share is as fast as possible. Pure.

Dynamic programming over the end of each share, as for shards; here every device has a share and holds all of its state
and its micro-batches in flight.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hydra_tune.strategies.pipeline.stages import Atom


@dataclass(frozen=True)
class Chain:
    """Costs of a model's atoms, in the model's order."""

    times: Sequence[float]
    states: Sequence[float]
    flying: Sequence[float]
    """Bytes kept per micro-batch in flight."""
    peaks: Sequence[float]
    owners: Sequence[int]
    """For each atom, the atom it must be placed with: the first that shares its parameters, or itself."""

    @classmethod
    def of(cls, atoms: Sequence[Atom], groups: Sequence[set[int]]) -> Chain:
        """Return the chain of these atoms; atoms that share parameters count with the first of them."""
        first = {atom: min(group) for group in groups for atom in group}
        owners = [first.get(index, index) for index in range(len(atoms))]
        times, states, flying, peaks = ([0.0] * len(atoms) for _ in range(4))
        for owner, atom in zip(owners, atoms, strict=True):
            times[owner] += atom.seconds
            states[owner] += atom.state_bytes
            flying[owner] += atom.activation_bytes
            peaks[owner] = max(peaks[owner], atom.peak_bytes)
        return cls(times, states, flying, peaks, owners)

    def balanced(self, waiting: Sequence[int], capacity: Sequence[float]) -> list[int] | None:
        """Return a device for each atom; None if the shares do not fit.

        `waiting` is the number of micro-batches in flight on each device, `capacity` its bytes.
        """
        count = len(self.times)
        total = [0.0, *itertools.accumulate(self.times)]
        infinite = (float("inf"), 0)
        # best[k] after device k: for each end, the least possible longest share and the start of the last one
        best = [
            (total[end], 0) if 0 in self._starts(end, waiting[0], capacity[0]) else infinite for end in range(count + 1)
        ]
        history = [best]
        for device in range(1, len(waiting)):
            best = [
                min(
                    (
                        (max(best[start][0], total[end] - total[start]), start)
                        for start in self._starts(end, waiting[device], capacity[device])
                    ),
                    default=infinite,
                )
                for end in range(count + 1)
            ]
            history.append(best)
        if best[-1][0] == float("inf"):
            return None
        device_of, end = [0] * count, count
        for device in range(len(waiting) - 1, -1, -1):
            start = history[device][end][1]
            device_of[start:end] = [device] * (end - start)
            end = start
        return [device_of[owner] for owner in self.owners]

    def lacking(self, waiting: Sequence[int], capacity: Sequence[float]) -> int:
        """Return the additional bytes each device would need for the shares to fit, to within one percent."""

        def fits(more: int) -> bool:
            return self.balanced(waiting, [size + more for size in capacity]) is not None

        enough = 1
        while not fits(enough):
            enough *= 2
        lacking = enough // 2
        while enough - lacking > max(1, enough // 100):
            middle = (lacking + enough) // 2
            lacking, enough = (lacking, middle) if fits(middle) else (middle, enough)
        return enough

    def _starts(self, end: int, waiting: int, capacity: float) -> Iterator[int]:
        """Yield the possible starts of a share with this end, from the shortest to the longest that fits."""
        held = peak = 0.0
        yield end
        for start in range(end - 1, -1, -1):
            held += self.states[start] + waiting * self.flying[start]
            peak = max(peak, self.peaks[start])
            if held + peak > capacity:
                return
            yield start
