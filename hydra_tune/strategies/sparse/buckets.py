"""All gradients of one kind in one flat tensor, reduced over the replicas in buckets while backward runs.

Backward reaches the last layers first, so they are stored first, and a bucket is sent as soon as the gradients of all
its layers have arrived, in the same order on every replica. Only gradients are sent: all replicas have the same masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hydra_tune.engine.collectives import Pending, begin_all_reduce

BUCKET_BYTES = 4 * 2**20


class Buckets:
    """The gradients of some layers, stored contiguously."""

    def __init__(
        self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device, bucket: int = BUCKET_BYTES
    ) -> None:
        """`sizes` are the layers' numbers of gradients, in the order of the model."""
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self.views: list[torch.Tensor] = [self.flat[:0]] * len(sizes)
        self.sent_bytes = 0
        """Bytes this replica has passed to all-reduce so far."""
        self._bucket_of: dict[int, int] = {}
        self._bounds: list[tuple[int, int]] = []
        self._members: list[set[int]] = []
        end = 0
        for layer in reversed(range(len(sizes))):
            start, end = end, end + sizes[layer]
            self.views[layer] = self.flat[start:end]
            if not self._members or (end - self._bounds[-1][0]) * dtype.itemsize > bucket:
                self._bounds.append((start, end))
                self._members.append(set())
            self._bounds[-1] = (self._bounds[-1][0], end)
            self._members[-1].add(layer)
            self._bucket_of[layer] = len(self._bounds) - 1
        self.reset()

    def reset(self) -> None:
        """Start a new step, in which no gradient has arrived."""
        self._missing = [set(members) for members in self._members]
        self._handles: list[Pending] = []

    def arrived(self, layer: int) -> None:
        """Mark the layer's gradient as complete."""
        self._missing[self._bucket_of[layer]].discard(layer)

    def send(self) -> bool:
        """Send the complete buckets, in order; True if all are sent."""
        while len(self._handles) < len(self._missing) and not self._missing[len(self._handles)]:
            self._send()
        return len(self._handles) == len(self._missing)

    def finish(self) -> None:
        """Send the remaining buckets, and wait until every gradient is the sum over the replicas."""
        while len(self._handles) < len(self._bounds):
            self._send()
        for handle in self._handles:
            handle.wait()
        self.reset()

    def _send(self) -> None:
        start, end = self._bounds[len(self._handles)]
        part = self.flat[start:end]
        self._handles.append(begin_all_reduce(part))
        self.sent_bytes += part.numel() * part.element_size()
