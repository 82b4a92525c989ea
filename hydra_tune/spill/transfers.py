"""Moves blocks between a device's memory and files.

A CPU reads and writes the files itself: `Transfers`. On an accelerator bytes pass through pinned host buffers and
streams of their own, one for each direction, so that copies run while the device computes: `StreamTransfers`. Nothing
waits for a whole stream there. Each buffer on the device has the events of its last read, use and write, and whoever
touches it next waits for these alone; the host waits only before it fills or empties a pinned buffer.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import torch

from hydra_tune.core import accelerator

PINNED_BUFFERS = 3
"""Pinned buffers for each direction: one that the host fills, one that is copied, one that waits."""

Fill = Callable[[torch.Tensor], object]
Done = Callable[[BaseException | None], None]


class Transfers:
    """Moves blocks of a CPU device: files are read into the blocks and written from them.

    The memory's lock is held for all calls but `read` and `write`.
    """

    def empty(self, size: int, *, to_read: bool) -> torch.Tensor:
        """Return a new buffer on the device; `to_read` if a file's content comes next, else the device writes to it."""
        return torch.empty(size, dtype=torch.uint8)

    def read(self, content: torch.Tensor, fill: Fill) -> None:
        """Let `fill` give the bytes, and move them to `content`, which may be used after `before_use`."""
        fill(content)

    def write(self, content: torch.Tensor, drain: Fill, done: Done) -> bool:
        """Let `drain` have the bytes of `content`. Return True if that has happened; else `done` is called then."""
        drain(content)
        return True

    def before_use(self, content: torch.Tensor) -> None:
        """Let the device's coming work on `content` wait for what moves it."""
        return

    def after_use(self, content: torch.Tensor) -> None:
        """Note that the device's work queued so far may use `content`."""
        return

    def let_go(self, memory: torch.Tensor) -> None:
        """Forget a buffer, which its owner is about to free."""
        return

    def close(self) -> None:
        """Stop the threads."""
        return


class Last(Enum):
    """The latest operation on a buffer of the device."""

    READ = "read"
    USE = "use"
    WRITE = "write"


@dataclass
class _Pinned:
    """A pinned host buffer, and the event after which it may be filled again."""

    memory: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    free_at: torch.Event | None = None


class Ring:
    """Pinned buffers that are taken in turn."""

    def __init__(self, count: int) -> None:
        self._free: queue.SimpleQueue[_Pinned] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put(_Pinned())

    def take(self, size: int) -> _Pinned:
        """Return a buffer of at least `size` bytes that no copy reads any longer; waits for one."""
        slot = self._free.get()
        if slot.free_at is not None:
            self.await_copy(slot.free_at)
            slot.free_at = None
        if slot.memory.numel() < size:
            slot.memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return slot

    def await_copy(self, event: torch.Event) -> None:
        """Block until a copy from a pinned buffer is over."""
        event.synchronize()

    def give(self, slot: _Pinned) -> None:
        """Give a buffer back."""
        self._free.put(slot)


class StreamTransfers(Transfers):
    """An accelerator's transfers: through pinned buffers, on a stream for each direction."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._in = torch.Stream(device)
        self._out = torch.Stream(device)
        self._to_device, self._to_host = Ring(PINNED_BUFFERS), Ring(PINNED_BUFFERS)
        self._events: dict[int, dict[Last, torch.Event]] = {}
        """The last read, use and write of each buffer, by its address."""
        self._leaving: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None

    def empty(self, size: int, *, to_read: bool) -> torch.Tensor:
        # Memory that is free again may at once be used by the stream that it was allocated on, and by no other.
        with self._in if to_read else self._computing():
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def before_use(self, content: torch.Tensor) -> None:
        self._wait(self._computing(), content, Last.READ)
        self._wait(self._computing(), content, Last.WRITE)

    def after_use(self, content: torch.Tensor) -> None:
        self._note(self._computing(), content, Last.USE)

    def read(self, content: torch.Tensor, fill: Fill) -> None:
        slot = self._to_device.take(content.numel())
        try:
            host = slot.memory[: content.numel()]
            fill(host)
            self._wait(self._in, content, Last.USE)
            self._wait(self._in, content, Last.WRITE)
            with self._in:
                content.copy_(host, non_blocking=True)
            slot.free_at = self._note(self._in, content, Last.READ)
        finally:
            self._to_device.give(slot)

    def write(self, content: torch.Tensor, drain: Fill, done: Done) -> bool:
        slot = self._to_host.take(content.numel())
        host = slot.memory[: content.numel()]
        self._wait(self._out, content, Last.USE)  # which has waited for the last read
        with self._out:
            host.copy_(content, non_blocking=True)
        copied = self._note(self._out, content, Last.WRITE)
        self._leaving.put(lambda: self._drain(slot, host, copied, drain, done))
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_files, name="hydra-writer", daemon=True)
            self._writer.start()
        return False

    def let_go(self, memory: torch.Tensor) -> None:
        # The allocator lends the memory to nobody else before these streams have passed.
        streams = {Last.READ: self._in, Last.USE: self._computing(), Last.WRITE: self._out}
        for what in self._events.pop(memory.data_ptr(), {}):
            self._keep_until(memory, streams[what])

    def close(self) -> None:
        if self._writer is not None:
            self._leaving.put(None)
            self._writer.join()

    def _computing(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)

    def _note(self, stream: torch.Stream, content: torch.Tensor, what: Last) -> torch.Event:
        event = stream.record_event()
        if content.numel():
            self._events.setdefault(content.data_ptr(), {})[what] = event
        return event

    def _wait(self, stream: torch.Stream, content: torch.Tensor, what: Last) -> None:
        """Let a stream's coming work wait for the last read, use or write of a buffer."""
        event = self._events.get(content.data_ptr(), {}).get(what)
        if event is not None:
            stream.wait_event(event)

    def _keep_until(self, memory: torch.Tensor, stream: torch.Stream) -> None:
        """Let the allocator keep a buffer that is freed until this stream has done its present work."""
        memory.record_stream(stream)

    # In the writer's thread

    def _write_files(self) -> None:
        accelerator.use(self._device)
        while (work := self._leaving.get()) is not None:
            work()

    def _drain(self, slot: _Pinned, host: torch.Tensor, copied: torch.Event, drain: Fill, done: Done) -> None:
        failure: BaseException | None = None
        try:
            slot.free_at = copied
            self._to_host.await_copy(copied)
            drain(host)
        except BaseException as error:  # the trial that the block belongs to gets it
            failure = error
        self._to_host.give(slot)
        done(failure)


def transfers_of(device: torch.device) -> Transfers:
    """Return the transfers of a device."""
    return Transfers() if device.type == "cpu" else StreamTransfers(device)
