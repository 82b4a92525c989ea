"""All gradients of one kind in one flat tensor, reduced over the replicas bucket by bucket while backward goes on.

Backward reaches the last layers first; so they lie first, and a bucket is sent as soon as the gradients of all its
layers are there, in this order on every replica. Nothing but the gradients is sent: the masks are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

BUCKET_BYTES = 4 * 2**20


class Buckets:
    """The gradients of some layers, back to back."""

    def __init__(
        self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device, bucket: int = BUCKET_BYTES
    ) -> None:
        """`sizes` are the layers' numbers of gradients, in the order of the model."""
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        self.views: list[torch.Tensor] = [self.flat[:0]] * len(sizes)
        self.sent_bytes = 0
        """Handed to all-reduce so far, by this replica."""
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
        """A new step: nothing is there yet."""
        self._missing = [set(members) for members in self._members]
        self._handles: list[dist.Work] = []

    def arrived(self, layer: int) -> None:
        """The layer's gradient is complete."""
        self._missing[self._bucket_of[layer]].discard(layer)

    def send(self) -> bool:
        """Send what can be sent, in order; whether that is all."""
        while len(self._handles) < len(self._missing) and not self._missing[len(self._handles)]:
            self._send()
        return len(self._handles) == len(self._missing)

    def finish(self) -> None:
        """Send what is left, and wait until every gradient is the sum over the replicas."""
        while len(self._handles) < len(self._bounds):
            self._send()
        for handle in self._handles:
            handle.wait()
        self.reset()

    def _send(self) -> None:
        start, end = self._bounds[len(self._handles)]
        part = self.flat[start:end]
        handle = dist.all_reduce(part, async_op=True)
        assert handle is not None
        self._handles.append(handle)
        self.sent_bytes += part.numel() * part.element_size()
