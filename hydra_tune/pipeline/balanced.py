"""A model in contiguous shares, one for each device, so that the longest takes the least time. Pure.

By dynamic programming over where each share ends, as in the partition of a model into shards; here every device has a
share, and a share holds all of its state and what is in flight on that device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hydra_tune.pipeline.stages import Atom


@dataclass(frozen=True)
class Chain:
    """What the atoms of a model take, in the model's order."""

    times: Sequence[float]
    states: Sequence[float]
    flying: Sequence[float]
    """What one micro-batch in flight keeps."""
    peaks: Sequence[float]
    owners: Sequence[int]
    """For each atom the one that it goes with: the first that shares its parameters, or itself."""

    @classmethod
    def of(cls, atoms: Sequence[Atom], groups: Sequence[set[int]]) -> Chain:
        """What shares parameters counts with its first user."""
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
        """A device for each atom; None where the shares do not fit.

        `waiting` is how many micro-batches are in flight on each device, `capacity` its bytes.
        """
        count = len(self.times)
        total = [0.0, *itertools.accumulate(self.times)]
        infinite = (float("inf"), 0)
        # best[k] after device k: for each end, the least possible longest share and where the last one begins
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
        """The bytes that each device would have to have more, to a hundredth, where the shares do not fit."""

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
        """Where a share may begin that ends there, from the shortest to the longest that fits."""
        held = peak = 0.0
        yield end
        for start in range(end - 1, -1, -1):
            held += self.states[start] + waiting * self.flying[start]
            peak = max(peak, self.peaks[start])
            if held + peak > capacity:
                return
            yield start
