"""Admission of trials: a trial begins only if the host has memory, and disk for spilling, to avoid swapping.

Each trial declares its needs before it begins. They count from then on, in use or not; a trial without room waits until
another one has ended. A trial that would not fit even alone is refused.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import disk_usage

import psutil

from hydra_tune.core.devices import format_bytes
from hydra_tune.spill.places import in_memory

SPARED = 0.1
"""Share of the machine's memory left for other programs."""
LOW = 0.05
"""Share of free memory below which no new trial begins while others run."""
LOW_SECONDS = 0.1
"""Seconds for which free memory is not read again."""


@dataclass(frozen=True)
class Taken:
    """Bytes that a trial takes, except accelerator memory."""

    memory: int
    """Bytes of host memory that cannot be spilled: the trial's memory on CPU devices."""
    spilled: int = 0
    """Bytes in the spill store: in host memory while there is some, else on disk."""


@dataclass(frozen=True)
class Room:
    """Bytes available for trials."""

    host: int
    disk: int
    on_devices: int
    """Total bytes of all CPU devices; trials that take turns there do not add up beyond this."""

    @classmethod
    def here(cls, places: Sequence[str], on_devices: int) -> Room:
        """Return the room on this machine; `places` are the spill directories, the last one mostly on disk."""
        memory = psutil.virtual_memory()
        disk = 0 if in_memory(Path(places[-1])) else disk_usage(Path(places[-1])).free
        return cls(max(0, int(memory.available - SPARED * memory.total)), disk, on_devices)

    def holds(self, trials: Iterable[Taken]) -> bool:
        """True if these trials can train at the same time."""
        memory, spilled = 0, 0
        for taken in trials:
            memory, spilled = memory + taken.memory, spilled + taken.spilled
        memory = min(memory, self.on_devices)
        return memory <= self.host and memory + spilled <= self.host + self.disk


@dataclass
class _LowMemory:
    """The last answer of `is_low`: the kernel computes it anew for each reader, which takes 50 µs."""

    read: float = -math.inf
    answer: bool = False


_low = _LowMemory()


def is_low() -> bool:
    """True if the machine has almost no free memory, as of the last `LOW_SECONDS`."""
    now = time.monotonic()
    if now - _low.read >= LOW_SECONDS:
        memory = psutil.virtual_memory()
        _low.read, _low.answer = now, bool(memory.available < LOW * memory.total)
    return _low.answer


class TooMuch(Exception):
    """A trial does not fit on this machine even alone."""


@dataclass
class Admission:
    """Decides which trials may begin. Call from one event loop."""

    room: Room
    show: Callable[[str], None]
    _promised: dict[int, Taken] = field(default_factory=dict)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def admit(self, trial: int, wanted: Taken) -> None:
        """Wait until there is room for the trial, then reserve it. Raises TooMuch if there never will be."""
        self._promised.pop(trial, None)
        if not self.room.holds([wanted]):
            raise TooMuch(
                f"the trial takes {format_bytes(wanted.memory)} of host memory and {format_bytes(wanted.spilled)} for "
                f"spilling; there are {format_bytes(self.room.host)}, and {format_bytes(self.room.disk)} of disk"
            )
        waiting = False
        while not self.room.holds([wanted, *self._promised.values()]):
            if not waiting:
                self.show(f"trial {trial} waits until another one has ended: the host has no memory for both")
                waiting = True
            self._ended.clear()
            await self._ended.wait()
        self._promised[trial] = wanted

    def release(self, trial: int) -> None:
        """Release the reservation of an ended trial."""
        if self._promised.pop(trial, None) is not None:
            self._ended.set()
