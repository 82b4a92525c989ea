"""Which shards are in the memory of which simulated device, and when they arrive there.

A shard's state lives in host memory (Hydra's spilling, arXiv 2110.08633). A device that runs a unit needs a copy of the
shard; a backward unit changes that copy, so that copies elsewhere are worthless and the host's is old until the changed
one is written back. It is written when it has to leave, or when another device asks for the shard. The least recently
used shard makes room.
"""

from __future__ import annotations

from typing import TypeAlias

Shard: TypeAlias = tuple[int, int]
"""A trial and the number of a shard in it."""


class Residency:
    """The memories of all devices. All shards have the same size; each device moves one at a time."""

    def __init__(self, devices: int, shard_bytes: int, memory: int | None, bandwidth: int) -> None:
        self.shard_bytes = shard_bytes
        self.bandwidth = bandwidth
        self.capacity = None if memory is None else memory // shard_bytes
        self.moved_bytes = 0
        self.peak_bytes = 0
        """The most that any device held at once."""
        # When each shard arrives. A dict keeps the order in which its keys came: the first is the least recently used.
        self._inside: list[dict[Shard, float]] = [{} for _ in range(devices)]
        self._free_at = [0.0] * devices
        self._holders: dict[Shard, set[int]] = {}
        self._changed: dict[Shard, int] = {}

    def bring(self, now: float, device: int, shard: Shard) -> float:
        """Have `shard` in the device's memory, as its most recently used; when it is there."""
        inside = self._inside[device]
        arrives = inside.pop(shard, None)
        if arrives is None:
            copies = 1
            if self._changed.pop(shard, None) is not None:
                copies += 1  # its holder writes it to the host first
            while self.capacity is not None and len(inside) >= self.capacity:
                copies += self._evict(device, next(iter(inside)))
            moved = copies * self.shard_bytes
            arrives = max(now, self._free_at[device]) + moved / self.bandwidth
            self._free_at[device] = arrives
            self._holders.setdefault(shard, set()).add(device)
            self.moved_bytes += moved
        inside[shard] = arrives
        self.peak_bytes = max(self.peak_bytes, len(inside) * self.shard_bytes)
        return arrives

    def change(self, device: int, shard: Shard) -> None:
        """A unit on `device` changes the shard: the copies of other devices are worthless."""
        for other in self._holders[shard] - {device}:
            del self._inside[other][shard]
        self._holders[shard] = {device}
        self._changed[shard] = device

    def forget(self, shard: Shard) -> None:
        """The shard's trial has ended."""
        for device in self._holders.pop(shard, ()):
            del self._inside[device][shard]
        self._changed.pop(shard, None)

    def inside(self, device: int) -> tuple[Shard, ...]:
        """What a device holds, the least recently used first."""
        return tuple(self._inside[device])

    def _evict(self, device: int, shard: Shard) -> int:
        """Let a shard go; the number of copies to be written for that."""
        del self._inside[device][shard]
        self._holders[shard].discard(device)
        if self._changed.get(shard) != device:
            return 0
        del self._changed[shard]
        return 1
