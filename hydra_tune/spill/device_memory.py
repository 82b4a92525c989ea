"""Device memory of a worker: blocks of bytes under one budget, with the rest in the spill store.

To make room, the block that is needed last is evicted; a changed block is first written to its trial's files. Blocks of
the running step are pinned; one to whose memory a tensor outside refers (a view in user code) stays too. A second
thread loads the next step's blocks during the current step, as far as there is room.

On an accelerator copies run while it computes (`transfers.StreamTransfers`): a block may be acquired before its copy is
over, and one that is evicted is written by a third thread. On a CPU the same calls read and write files directly.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from functools import partial

import torch

from hydra_tune.core import accelerator
from hydra_tune.spill.block import Block, OutOfDeviceMemory
from hydra_tune.spill.leaving import Leaving
from hydra_tune.spill.store import SpillFiles
from hydra_tune.spill.transfers import transfers_of

logger = logging.getLogger(__name__)

LARGEST_WASTE = 1.1
"""A free buffer is reused for a block if it is at most this many times larger."""


class DeviceMemory:
    """The blocks of all trials of one worker. Thread-safe for the worker's thread and the transfer thread."""

    def __init__(self, budget: int, device: torch.device, *, prefetch: bool = True) -> None:
        self.budget = budget
        """Bytes that may be used now."""
        self._most = budget
        self.device = device
        self.peak = 0
        self.hits = 0
        self.misses = 0
        self.running: SpillFiles | None = None
        """The trial whose steps run now: its blocks rank before those of other trials."""
        self._blocks: dict[tuple[int, str], Block] = {}
        self._free: list[torch.Tensor] = []
        self._addresses: set[int] = set()
        """Start addresses of block contents and free buffers."""
        self._used = 0
        """Bytes of blocks and of free buffers."""
        self._reserved = 0
        self._transfers = transfers_of(device)
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._leaving = Leaving(self._news)
        self._wanted: list[tuple[SpillFiles, str, float]] = []
        """Blocks for the transfer thread to load next."""
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
        self._transfers.close()

    def limit(self, size: int) -> None:
        """Use at most `size` bytes from now on, and never more than the device's own budget."""
        with self._lock:
            self._reserved, self.budget = 0, min(size, self._most)  # a finished step may have left a reservation
            self._make_room(0)

    def lower(self, share: float) -> None:
        """Reduce the device's budget to this share: it has less memory than assumed."""
        self._most = int(self._most * share)
        self.limit(self.budget)

    def begin_measuring(self) -> None:
        """Reset the peak to the current use."""
        with self._lock:
            self.peak = self._used + self._reserved

    # Used by the running step

    def reserve(self, size: int) -> None:
        """Reserve `size` bytes for the step's own allocations, replacing the earlier reservation."""
        with self._lock:
            self._reserved = 0
            self._make_room(size)
            self._reserved = size
            self._note_peak()

    def reserve_less(self, size: int) -> None:
        """Lower the reservation to `size` bytes, where it is more."""
        with self._lock:
            self._reserved = min(self._reserved, size)

    def in_use(self, files: SpillFiles, keys: Iterable[str]) -> int:
        """Return the bytes of those of these blocks that are on the device and cannot be evicted now."""
        with self._lock:
            found = (self._blocks.get((id(files), key)) for key in keys)
            return sum(block.size for block in found if block is not None and not block.can_go)

    def acquire(self, files: SpillFiles, key: str, due: float) -> torch.Tensor:
        """Return a block's content on the device, read if necessary; pinned until released."""
        with self._lock:
            if (id(files), key) not in self._blocks:
                self._leaving.wait_for(files, key)
            block = self._blocks.get((id(files), key))
            if block is not None:
                block.pins += 1
                self._wait_for(block)
                if block.content is not None:
                    self.hits += 1
                    self._transfers.before_use(block.content)
                    return block.content
                # The transfer thread could not load the block: a reason to fail shows here.
            self.misses += 1
            self._leaving.raise_failure(files)
            block = self._place_for(files, key, due)
            self._read(block)
            assert block.content is not None
            self._transfers.before_use(block.content)
            return block.content

    def new(self, files: SpillFiles, key: str, size: int) -> torch.Tensor:
        """Return a new pinned block of that size, uninitialised."""
        with self._lock:
            block = Block(files, key, size, due=0.0, changed=True, pins=1)
            self._give_buffer(block, to_read=False)
            assert block.buffer is not None
            block.content = block.buffer[:size]
            self._blocks[id(files), key] = block
            self._transfers.before_use(block.content)
            return block.content

    def adopt(self, files: SpillFiles, key: str, content: torch.Tensor, due: float) -> None:
        """Turn a tensor made by the step into a block, which can then be spilled."""
        with self._lock:
            self._make_room(content.numel())
            if content.data_ptr() in self._addresses:
                # Autograd may pass one tensor to several receivers; each block needs memory of its own.
                content = content.clone()
            self._blocks[id(files), key] = Block(files, key, content.numel(), due, content=content, changed=True)
            self._used += content.numel()
            if content.numel():
                self._addresses.add(content.data_ptr())
            self._transfers.after_use(content)
            self._note_peak()

    def release(self, files: SpillFiles, key: str, due: float, *, changed_at: int | None = None) -> None:
        """Unpin a block, next needed at `due`; `changed_at` is its new version if the step changed it."""
        with self._lock:
            block = self._blocks[id(files), key]
            block.pins -= 1
            block.due = due
            assert block.content is not None
            self._transfers.after_use(block.content)
            if changed_at is not None:
                block.changed, block.version = True, changed_at
            self._news.notify_all()

    def holds(self, files: SpillFiles, key: str) -> bool:
        """True if a block is on the device, or on its way from there to its file."""
        with self._lock:
            return (id(files), key) in self._blocks or self._leaving.has(files, key)

    def discard(self, files: SpillFiles, key: str) -> None:
        """Delete a block from the device and from its files."""
        with self._lock:
            block = self._blocks.get((id(files), key))
            if block is not None:
                self._wait_for(block)
                self._drop(block)
            # After the waits, since the transfer thread may have written the block to make room.
            self._leaving.wait_for(files, key)
            files.delete(key)

    def flush(self, files: SpillFiles) -> None:
        """Write every changed block of a trial to its files; the blocks stay."""
        with self._lock:
            for block in self._of(files):
                self._wait_for(block)
                self._write(block)
            self._leaving.wait_for_all(files)
            self._leaving.raise_failure(files)

    def forget(self, files: SpillFiles, *, outdated_only: bool = False) -> None:
        """Drop a trial's blocks without writing them, or only those whose files have another version."""
        with self._lock:
            self._leaving.wait_for_all(files)
            self._leaving.forget_failure(files)
            for block in self._of(files):
                self._wait_for(block)
                stored = files.find(block.key)
                if not outdated_only or stored is None or stored.version != block.version or block.changed:
                    self._drop(block)
            if not outdated_only and self.running is files:
                self.running = None  # pending loads for it are no longer wanted
            while self._free:
                self._let_go(self._free.pop())

    def _of(self, files: SpillFiles) -> list[Block]:
        return [block for block in self._blocks.values() if block.files is files]

    # Used for the next step

    def prefetch(self, wanted: Iterable[tuple[SpillFiles, str, float]]) -> None:
        """Load these blocks in the background, as far as there is room; replaces the earlier request.

        The rest of an earlier request belongs to a step that has begun. That step loads its blocks itself; a late load
        would evict a block that is still needed.
        """
        if self._thread is not None:
            with self._lock:
                self._wanted = list(wanted)
                self._wishes.notify()

    def _bring_in(self) -> None:
        accelerator.use(self.device)
        with self._lock:
            while not self._closing:
                if not self._wanted:
                    self._wishes.wait()
                    continue
                wanted = self._wanted
                files, key, due = wanted.pop(0)
                try:
                    self._load(files, key, due)
                except Exception as error:  # noqa: BLE001 - this thread serves all trials of the worker
                    # The step that needs the block reads it itself, and reports any error.
                    logger.debug("block %s could not be prefetched: %s", key, error)
                    wanted.clear()  # the rest of this request, not a newer one

    def load(self, files: SpillFiles, key: str, due: float) -> None:
        """Load a block for a later step, as the transfer thread does."""
        with self._lock:
            self._load(files, key, due)

    def _load(self, files: SpillFiles, key: str, due: float) -> None:
        if self._is_worth_it(files, key, due):
            block = self._place_for(files, key, due)
            self._read(block)
            block.pins -= 1
            self._news.notify_all()

    def _is_worth_it(self, files: SpillFiles, key: str, due: float) -> bool:
        """True if a block is absent and loading it evicts nothing that is needed sooner."""
        stored = files.find(key)
        there = (id(files), key) in self._blocks or self._leaving.has(files, key)
        if stored is None or there or files is not self.running:
            return False
        lacking = self._used - sum(b.numel() for b in self._free) + stored.size + self._reserved - self.budget
        if lacking <= 0:
            return True
        rank = self._rank(Block(files, key, 0, due))
        return lacking <= sum(b.size for b in self._blocks.values() if self._rank(b) > rank and b.can_go)

    # Called with the lock held

    def _rank(self, block: Block) -> tuple[bool, float]:
        return block.files is not self.running, block.due

    def _place_for(self, files: SpillFiles, key: str, due: float) -> Block:
        """Return a pinned block with a buffer to read into."""
        stored = files.find(key)
        assert stored is not None, f"there is no block {key}"
        block = Block(files, key, stored.size, due, stored.version, pins=1, moving=True)
        self._blocks[id(files), key] = block
        try:
            self._give_buffer(block, to_read=True)
        except BaseException:
            block.moving = False
            self._drop(block)
            raise
        return block

    def _give_buffer(self, block: Block, *, to_read: bool) -> None:
        while True:
            fitting = [b for b in self._free if block.size <= b.numel() <= block.size * LARGEST_WASTE]
            if fitting:
                block.buffer = min(fitting, key=torch.Tensor.numel)
                self._free = [buffer for buffer in self._free if buffer is not block.buffer]
                return
            if self._used + block.size + self._reserved <= self.budget:
                block.buffer = self._transfers.empty(block.size, to_read=to_read)
                self._addresses.add(block.buffer.data_ptr())
                self._used += block.size
                self._note_peak()
                return
            self._give_up_something(block.size)

    def _make_room(self, size: int) -> None:
        while self._used + size + self._reserved > self.budget:
            self._give_up_something(size)

    def _give_up_something(self, size: int) -> None:
        """Free the oldest free buffer, else evict the block needed last, else wait for a block in transfer."""
        if self._free:
            self._let_go(self._free.pop(0))
            return
        idle = [block for block in self._blocks.values() if block.is_idle]
        idle.sort(key=self._rank, reverse=True)
        last = next((block for block in idle if block.can_go), None)
        if last is not None:
            self._write(last)
            if last.can_go and not last.changed:
                self._drop(last)
        elif any(
            block.moving and (block.buffer is not None or block.content is not None) for block in self._blocks.values()
        ):
            self._news.wait()
        else:
            raise OutOfDeviceMemory(self._used + size + self._reserved, self.budget)

    def _read(self, block: Block) -> None:
        """Fill a block from its file; the lock is released meanwhile."""
        assert block.buffer is not None
        content = block.buffer[: block.size]
        self._lock.release()
        try:
            self._transfers.read(content, partial(block.files.read, block.key))
        except BaseException:
            self._lock.acquire()
            block.moving = False
            self._drop(block)
            raise
        self._lock.acquire()
        block.content, block.moving = content, False
        self._news.notify_all()

    def _write(self, block: Block) -> None:
        """Write a changed block to its file, or begin to; the lock is released meanwhile."""
        if not block.changed:
            return
        content, version = block.content, block.version
        assert content is not None
        block.moving, block.changed = True, False
        self._leaving.begin(block.files, block.key)
        later = False
        self._lock.release()
        try:
            drain = partial(block.files.write, block.key, version)
            later = not self._transfers.write(content, drain, partial(self._has_left, block.files, block.key))
        except FileNotFoundError as error:
            if block.files is self.running:
                block.changed = True
                raise
            # The trial has ended, but this device has not yet been told: its blocks can be evicted.
            logger.debug("block %s was dropped, its trial has ended: %s", block.key, error)
        except BaseException:
            block.changed = True
            raise
        finally:
            self._lock.acquire()
            block.moving = False
            if not later:
                self._leaving.end(block.files, block.key)
            self._news.notify_all()

    def _has_left(self, files: SpillFiles, key: str, failure: BaseException | None) -> None:
        """Note that a block is in its file, or why not; called by the thread that writes it."""
        with self._lock:
            if isinstance(failure, FileNotFoundError) and files is not self.running:
                logger.debug("block %s was dropped, its trial has ended: %s", key, failure)
            elif failure is not None:
                self._leaving.fail(files, failure)
            self._leaving.end(files, key)

    def _drop(self, block: Block) -> None:
        if self._blocks.get((id(block.files), block.key)) is not block:
            return  # the other thread has evicted the block
        del self._blocks[id(block.files), block.key]
        if block.buffer is not None and not block.referred_to:
            self._free.append(block.buffer)
        elif block.buffer is not None:
            self._let_go(block.buffer)
        elif block.content is not None:
            self._let_go(block.content)
        block.content = block.buffer = None
        self._news.notify_all()

    def _let_go(self, memory: torch.Tensor) -> None:
        self._transfers.let_go(memory)
        self._used -= memory.numel()
        self._addresses.discard(memory.data_ptr())

    def _wait_for(self, block: Block) -> None:
        while block.moving:
            self._news.wait()

    def _note_peak(self) -> None:
        self.peak = max(self.peak, self._used + self._reserved)
