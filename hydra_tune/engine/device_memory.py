"""What a worker holds on its device: blocks of bytes under one budget, the rest in the spill store.

Every block has a key, a size and the moment it is due next. To make room, the block that is due last goes: where it was
changed it is written to its trial's files first. What the running step uses is pinned. A second thread brings in what
the next step needs while the present one computes, as far as there is room for it.

On an accelerator blocks live in its memory and pass through pinned host buffers (`accelerator.Staging`); on a CPU the
device's memory is the worker's own, and the same calls read and write the files directly.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hydra_tune.devices import format_bytes
from hydra_tune.engine import accelerator
from hydra_tune.engine.spill import SpillFiles
from hydra_tune.engine.unit import TrialEnded

logger = logging.getLogger(__name__)

LARGEST_WASTE = 1.1
"""A buffer that is free is used for a block if it is at most so much larger."""


class OutOfDeviceMemory(TrialEnded):
    """A step needs more than the device's budget holds."""

    status = "OUT_OF_MEMORY"

    def __init__(self, needed: int, budget: int) -> None:
        super().__init__(f"a step needs {format_bytes(needed)} of a device budget of {format_bytes(budget)}")


@dataclass
class _Block:
    """A block that is on the device, or on its way there or away."""

    files: SpillFiles
    key: str
    size: int
    due: float
    version: int = 0
    content: torch.Tensor | None = None
    """None until it has been read."""
    buffer: torch.Tensor | None = None
    """What the content lies in, where that is to be used again."""
    changed: bool = False
    pins: int = 0
    moving: bool = False
    """Whether a thread is reading or writing it."""


class DeviceMemory:
    """The blocks of all trials of one worker. Safe to use from the worker's thread beside the transfer thread."""

    def __init__(self, budget: int, device: torch.device, *, prefetch: bool = True) -> None:
        self.budget = budget
        """What it may take now."""
        self._most = budget
        self.device = device
        self.peak = 0
        self.hits = 0
        self.misses = 0
        self.running: SpillFiles | None = None
        """The trial whose steps run now: other trials' blocks are due later than all of its own."""
        self._blocks: dict[tuple[int, str], _Block] = {}
        self._free: list[torch.Tensor] = []
        self._addresses: set[int] = set()
        """Where the contents of blocks and the free buffers begin."""
        self._used = 0
        """Bytes of blocks and of free buffers."""
        self._reserved = 0
        self._staging = accelerator.Staging(device)
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._wanted: list[tuple[SpillFiles, str, float]] = []
        """What the transfer thread is to bring in next."""
        self._wishes = threading.Condition(self._lock)
        self._closing = False
        self._thread: threading.Thread | None = None
        if prefetch:
            self._thread = threading.Thread(target=self._bring_in, name="hydra-transfer", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop the transfer thread."""
        if self._thread is not None:
            with self._lock:
                self._closing = True
                self._wishes.notify()
            self._thread.join()

    def limit(self, size: int) -> None:
        """Take at most so many bytes from here on, and never more than the device's own budget."""
        with self._lock:
            self._reserved = 0  # of a step that is over
            self.budget = min(size, self._most)
            self._make_room(0)

    def lower(self, share: float) -> None:
        """The device has less than its budget says."""
        self._most = int(self._most * share)
        self.limit(self.budget)

    def begin_measuring(self) -> None:
        """Forget the peak of earlier units."""
        with self._lock:
            self.peak = self._used + self._reserved

    # For the running step

    def reserve(self, size: int) -> None:
        """Keep `size` bytes for what the step itself allocates, in place of what was kept before."""
        with self._lock:
            self._reserved = 0
            self._make_room(size)
            self._reserved = size
            self._note_peak()

    def acquire(self, files: SpillFiles, key: str, due: float) -> torch.Tensor:
        """A block's content on the device, read in if need be; pinned until it is released."""
        with self._lock:
            block = self._blocks.get((id(files), key))
            if block is not None:
                block.pins += 1
                self._wait_for(block)
                if block.content is not None:
                    self.hits += 1
                    return block.content
                # The transfer thread could not bring it in: here it is seen why.
            self.misses += 1
            block = self._place_for(files, key, due)
            self._read(block)
            assert block.content is not None
            return block.content

    def new(self, files: SpillFiles, key: str, size: int) -> torch.Tensor:
        """A new block of that size, pinned; its bytes are whatever was there."""
        with self._lock:
            block = _Block(files, key, size, due=0.0, changed=True, pins=1)
            self._give_buffer(block)
            assert block.buffer is not None
            block.content = block.buffer[:size]
            self._blocks[id(files), key] = block
            return block.content

    def adopt(self, files: SpillFiles, key: str, content: torch.Tensor, due: float) -> None:
        """Take the bytes of a tensor that the step has made as a block: it can be spilled from now on."""
        with self._lock:
            self._make_room(content.numel())
            if content.data_ptr() in self._addresses:
                # Autograd hands one tensor to several that want it; each block is its own to change and to reuse.
                content = content.clone()
            self._blocks[id(files), key] = _Block(files, key, content.numel(), due, content=content, changed=True)
            self._used += content.numel()
            if content.numel():
                self._addresses.add(content.data_ptr())
            self._note_peak()

    def release(self, files: SpillFiles, key: str, due: float, *, changed_at: int | None = None) -> None:
        """The step is done with a block, which is due next at `due`; `changed_at` is the version it made of it."""
        with self._lock:
            block = self._blocks[id(files), key]
            block.pins -= 1
            block.due = due
            if changed_at is not None:
                block.changed, block.version = True, changed_at
            self._news.notify_all()

    def holds(self, files: SpillFiles, key: str) -> bool:
        """Whether a block is on the device."""
        with self._lock:
            return (id(files), key) in self._blocks

    def discard(self, files: SpillFiles, key: str) -> None:
        """A block is no longer needed anywhere."""
        with self._lock:
            block = self._blocks.get((id(files), key))
            if block is not None:
                self._wait_for(block)
                self._drop(block)
            # After the wait: the transfer thread may have written the block to make room.
            files.delete(key)

    def flush(self, files: SpillFiles) -> None:
        """Write every changed block of a trial to its files; the blocks stay."""
        with self._lock:
            for block in self._of(files):
                self._wait_for(block)
                self._write(block)

    def forget(self, files: SpillFiles, *, outdated_only: bool = False) -> None:
        """Drop a trial's blocks without writing them; or only those of which its files have another version."""
        with self._lock:
            for block in self._of(files):
                self._wait_for(block)
                stored = files.find(block.key)
                if not outdated_only or stored is None or stored.version != block.version or block.changed:
                    self._drop(block)
            if not outdated_only and self.running is files:
                self.running = None  # what is still to be brought in for it is not wanted any more
            self._free_all()

    def _of(self, files: SpillFiles) -> list[_Block]:
        return [block for block in self._blocks.values() if block.files is files]

    # For the step after it

    def prefetch(self, wanted: Iterable[tuple[SpillFiles, str, float]]) -> None:
        """Bring these blocks in, in the background, as far as there is room, instead of what was wanted before.

        What is left of an earlier wish is for a step that has begun: it takes its blocks itself, and bringing one in
        after that would cost one that is still to be used its place.
        """
        if self._thread is not None:
            with self._lock:
                self._wanted = list(wanted)
                self._wishes.notify()

    def _bring_in(self) -> None:
        with self._lock:
            while not self._closing:
                if not self._wanted:
                    self._wishes.wait()
                    continue
                wanted = self._wanted
                files, key, due = wanted.pop(0)
                if not self._is_worth_it(files, key, due):
                    continue
                try:
                    block = self._place_for(files, key, due)
                    self._read(block)
                except Exception as error:  # noqa: BLE001 - this thread serves all trials of the worker
                    # The step that needs the block reads it itself, and fails where there is a reason to.
                    logger.debug("block %s is not brought in: %s", key, error)
                    wanted.clear()  # and no newer one
                    continue
                block.pins -= 1
                self._news.notify_all()

    def _is_worth_it(self, files: SpillFiles, key: str, due: float) -> bool:
        """Whether a block is not here, and brings nothing out that is due sooner."""
        stored = files.find(key)
        if stored is None or (id(files), key) in self._blocks or files is not self.running:
            return False
        rank = self._rank(_Block(files, key, 0, due))
        later = sum(b.size for b in self._blocks.values() if b.pins == 0 and not b.moving and self._rank(b) > rank)
        free = sum(buffer.numel() for buffer in self._free)
        return self._used - later - free + stored.size + self._reserved <= self.budget

    # With the lock held

    def _rank(self, block: _Block) -> tuple[bool, float]:
        return block.files is not self.running, block.due

    def _place_for(self, files: SpillFiles, key: str, due: float) -> _Block:
        """A pinned block, with a buffer to read it into."""
        stored = files.find(key)
        assert stored is not None, f"there is no block {key}"
        block = _Block(files, key, stored.size, due, stored.version, pins=1, moving=True)
        self._blocks[id(files), key] = block
        try:
            self._give_buffer(block)
        except BaseException:
            self._abandon(block)
            raise
        return block

    def _abandon(self, block: _Block) -> None:
        block.moving = False
        self._drop(block)

    def _give_buffer(self, block: _Block) -> None:
        while True:
            fitting = [b for b in self._free if block.size <= b.numel() <= block.size * LARGEST_WASTE]
            if fitting:
                block.buffer = min(fitting, key=torch.Tensor.numel)
                self._free = [buffer for buffer in self._free if buffer is not block.buffer]
                return
            if self._used + block.size + self._reserved <= self.budget:
                block.buffer = torch.empty(block.size, dtype=torch.uint8, device=self.device)
                self._addresses.add(block.buffer.data_ptr())
                self._used += block.size
                self._note_peak()
                return
            self._give_up_something(block.size)

    def _make_room(self, size: int) -> None:
        while self._used + size + self._reserved > self.budget:
            self._give_up_something(size)

    def _give_up_something(self, size: int) -> None:
        """Free the buffer that waits longest, else evict the block that is due last, else wait for one on its way."""
        if self._free:
            self._let_go(self._free.pop(0))
            return
        idle = [block for block in self._blocks.values() if block.pins == 0 and not block.moving]
        if idle:
            last = max(idle, key=self._rank)
            self._write(last)
            if last.pins == 0 and not last.changed:
                self._drop(last)
        elif any(
            block.moving and (block.buffer is not None or block.content is not None) for block in self._blocks.values()
        ):
            self._news.wait()
        else:
            raise OutOfDeviceMemory(self._used + size + self._reserved, self.budget)

    def _read(self, block: _Block) -> None:
        """Fill a block from its file; the lock is let go meanwhile."""
        assert block.buffer is not None
        content = block.buffer[: block.size]
        self._lock.release()
        try:
            self._staging.read(content, lambda host: block.files.read(block.key, host))
        except BaseException:
            self._lock.acquire()
            self._abandon(block)
            raise
        self._lock.acquire()
        block.content, block.moving = content, False
        self._news.notify_all()

    def _write(self, block: _Block) -> None:
        """Write a changed block to its file; the lock is let go meanwhile."""
        if not block.changed:
            return
        content, version = block.content, block.version
        assert content is not None
        block.moving, block.changed = True, False
        self._lock.release()
        try:
            self._staging.write(content, lambda host: block.files.write(block.key, version, host))
        except FileNotFoundError as error:
            if block.files is self.running:
                block.changed = True
                raise
            # Its trial has ended, and this device is still to hear of it: whoever needs the room now may have it.
            logger.debug("block %s is of no use any more: %s", block.key, error)
        except BaseException:
            block.changed = True
            raise
        finally:
            self._lock.acquire()
            block.moving = False
            self._news.notify_all()

    def _drop(self, block: _Block) -> None:
        if self._blocks.get((id(block.files), block.key)) is not block:
            return  # whoever waited for it finds that the other thread has evicted it
        del self._blocks[id(block.files), block.key]
        if block.buffer is not None:
            self._free.append(block.buffer)
        elif block.content is not None:
            self._let_go(block.content)
        block.content = block.buffer = None
        self._news.notify_all()

    def _free_all(self) -> None:
        while self._free:
            self._let_go(self._free.pop())

    def _let_go(self, memory: torch.Tensor) -> None:
        self._used -= memory.numel()
        self._addresses.discard(memory.data_ptr())

    def _wait_for(self, block: _Block) -> None:
        while block.moving:
            self._news.wait()

    def _note_peak(self) -> None:
        self.peak = max(self.peak, self._used + self._reserved)
