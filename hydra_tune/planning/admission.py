"""Trials begin only while the host has the memory for them, and the disk for what they spill: no search drives the
machine into swap.

Each trial says what it will take before it begins. What is promised counts from then on, whether it is in use yet or
not; a trial for which there is no room waits until another one has ended. One that would not fit even alone is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import disk_usage

import psutil

from hydra_tune.devices import format_bytes
from hydra_tune.engine.spill import in_memory

SPARED = 0.1
"""Of the machine's memory, for everybody else."""
LOW = 0.05
"""Below this share of free memory no new trial is asked for while others run."""


@dataclass(frozen=True)
class Taken:
    """What a trial takes beyond accelerators' own memory, in bytes."""

    memory: int
    """Host memory that cannot be spilled: what it has on devices that are CPUs."""
    spilled: int = 0
    """In the spill store: in host memory while there is some, else on disk."""


@dataclass(frozen=True)
class Room:
    """What there is for trials, in bytes."""

    host: int
    disk: int
    on_devices: int
    """All that devices which are CPUs may take; trials that take turns there do not add up beyond it."""

    @classmethod
    def here(cls, places: Sequence[str], on_devices: int) -> Room:
        """What this machine can give; `places` are where state is spilled to, the last one mostly on disk."""
        memory = psutil.virtual_memory()
        disk = 0 if in_memory(Path(places[-1])) else disk_usage(Path(places[-1])).free
        return cls(max(0, int(memory.available - SPARED * memory.total)), disk, on_devices)

    def holds(self, trials: Iterable[Taken]) -> bool:
        """Whether these trials can be in training at the same time."""
        memory, spilled = 0, 0
        for taken in trials:
            memory, spilled = memory + taken.memory, spilled + taken.spilled
        memory = min(memory, self.on_devices)
        return memory <= self.host and memory + spilled <= self.host + self.disk


def is_low() -> bool:
    """Whether the machine has next to no memory left."""
    memory = psutil.virtual_memory()
    return bool(memory.available < LOW * memory.total)


class TooMuch(Exception):
    """A trial that this machine could not bear even alone."""


@dataclass
class Admission:
    """Who may begin. Call from one event loop."""

    room: Room
    show: Callable[[str], None]
    _promised: dict[int, Taken] = field(default_factory=dict)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def admit(self, trial: int, wanted: Taken) -> None:
        """Return when there is room for the trial; it counts from then on. Raises TooMuch where there never will be."""
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
        """A trial has ended, and whatever it took is free."""
        if self._promised.pop(trial, None) is not None:
            self._ended.set()
