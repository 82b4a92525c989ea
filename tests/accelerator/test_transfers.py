"""Blocks that move while the device computes arrive as they were; a transfer that forgets to wait is caught."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hydra_tune.spill.device_memory import DeviceMemory
from hydra_tune.spill.places import SpillFull
from hydra_tune.spill.store import SpillFiles
from hydra_tune.spill.transfers import Last, Ring, StreamTransfers
from tests.accelerator.process import on_device

DEVICE = "testdev:0"
SIZES = {"a": 64 * 512, "b": 48 * 512, "c": 64 * 512, "d": 40 * 512, "e": 64 * 512, "f": 52 * 512}
BUDGET = 200 * 512
LATE = ("nothing", "computing", "reading", "writing")


class Driver:
    """Uses, changes, spills and reads blocks at random, and knows what each must contain.

    One of the device's streams is late: it does nothing before somebody waits for it. The others are always done.
    """

    def __init__(self, folder: Path, late: str, seed: int) -> None:
        self.files = SpillFiles([folder], "trial")
        self.memory = DeviceMemory(BUDGET, torch.device(DEVICE), prefetch=False)
        self.memory.running = self.files
        transfers: Any = self.memory._transfers
        transfers._to_device = Ring(1)  # so that each read has to wait for the one before
        streams = {
            "computing": torch.accelerator.current_stream(DEVICE), "reading": transfers._in, "writing": transfers._out
        }  # fmt: skip
        self.late = [stream for name, stream in streams.items() if name == late]
        self.early = [stream for name, stream in streams.items() if name != late]
        if late == "writing":
            self._hold_the_writer(transfers)
        self.random = random.Random(seed)
        self.expected = dict.fromkeys(SIZES, 0)
        self.seen: list[tuple[str, int, torch.Tensor]] = []
        self.version = 0

    def _hold_the_writer(self, transfers: Any) -> None:
        """Let the thread that writes files do nothing either before somebody waits for it."""
        gate, drain, leaving = threading.Event(), transfers._drain, self.memory._leaving

        def opened(wait: Callable[..., Any], *arguments: Any) -> Any:
            gate.set()
            try:
                return wait(*arguments)
            finally:
                gate.clear()

        wait_for, take, close = leaving.wait_for, transfers._to_host.take, transfers.close
        transfers._drain = lambda *arguments: (gate.wait(), drain(*arguments))
        leaving.wait_for_all = partial(opened, leaving.wait_for_all)
        leaving.wait_for = lambda files, key: leaving.has(files, key) and opened(wait_for, files, key)
        transfers._to_host.take = lambda size: opened(take, size) if transfers._to_host._free.empty() else take(size)
        transfers.close = lambda: (gate.set(), close())

    def run(self, steps: int) -> list[str]:
        """Return what is wrong after so many steps."""
        from tests.accelerator import backend

        for key, size in SIZES.items():
            self.files.write(key, 0, torch.zeros(size, dtype=torch.uint8))
        self.files.commit(None)
        actions = [self.use, self.use, self.change, self.change, self.make, self.adopt, self.prefetch, self.scratch]
        with backend.held(*self.late):
            self.give_up_unread()
            for step in range(steps):
                action = self.flush if step % 15 == 14 else self.random.choice(actions)
                action(self.random.choice(list(SIZES)), float(step))
                for stream in self.early:
                    stream.synchronize()
            self.flush("", 0.0)
        self.memory.close()
        torch.accelerator.synchronize()
        wrong = [f"{key} was not {value}" for key, value, found in self.seen if not found.eq(value).all()]
        for key, value in self.expected.items():
            host = torch.empty(SIZES[key], dtype=torch.uint8)
            self.files.read(key, host)
            wrong += [] if host.eq(value).all() else [f"{key} is not {value} in its file"]
        return wrong

    def use(self, key: str, due: float) -> None:
        content = self.memory.acquire(self.files, key, due)
        self.seen.append((key, self.expected[key], content.clone()))
        self.memory.release(self.files, key, due + self.random.random() * 10)

    def change(self, key: str, due: float) -> None:
        content = self.memory.acquire(self.files, key, due)
        content.add_(1)
        self.expected[key] = (self.expected[key] + 1) % 256
        self._changed(key, due)

    def make(self, key: str, due: float) -> None:
        self.memory.discard(self.files, key)
        content = self.memory.new(self.files, key, SIZES[key])
        self.expected[key] = self.random.randrange(256)
        content.fill_(self.expected[key])
        self._changed(key, due)

    def adopt(self, key: str, due: float) -> None:
        self.memory.discard(self.files, key)
        self.expected[key] = self.random.randrange(256)
        made = torch.full((SIZES[key],), self.expected[key], dtype=torch.uint8, device=DEVICE)
        self.memory.adopt(self.files, key, made, due)

    def _changed(self, key: str, due: float) -> None:
        self.version += 1
        self.memory.release(self.files, key, due + self.random.random() * 10, changed_at=self.version)

    def prefetch(self, key: str, due: float) -> None:
        for other in self.random.sample(list(SIZES), 3):
            self.memory.load(self.files, other, due + self.random.random() * 8)

    def scratch(self, key: str, due: float) -> None:
        """Let the step allocate memory of its own, as kernels do."""
        made = [torch.empty(size, dtype=torch.uint8, device=DEVICE).fill_(255) for size in set(SIZES.values())]
        self.seen.append(("memory of the step", 255, self.random.choice(made)))

    def give_up_unread(self) -> None:
        """Free a buffer that the step allocated, with the read of a block into it still under way."""
        self.memory.new(self.files, "n", SIZES["a"]).fill_(1)
        self.memory.release(self.files, "n", 1.0, changed_at=1)
        self.memory.discard(self.files, "n")
        self.memory.load(self.files, "a", 1.0)
        self.memory.forget(self.files)
        self.memory.running = self.files
        made = torch.empty(SIZES["a"], dtype=torch.uint8, device=DEVICE).fill_(255)
        torch.accelerator.current_stream(DEVICE).synchronize()
        self.seen.append(("memory of the step", 255, made))

    def flush(self, _key: str, _due: float) -> None:
        self.memory.flush(self.files)


@contextmanager
def _replaced(owner: type, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def _without_wait(stream: str, what: Last) -> Any:
    def make(before: Any) -> Any:
        def wait(self: Any, on: torch.Stream, content: torch.Tensor, last: Last) -> None:
            role = {self._in: "reading", self._out: "writing"}.get(on, "computing")
            if (role, last) != (stream, what):
                before(self, on, content, last)

        return wait

    return _replaced(StreamTransfers, "_wait", make)


def _freed_too_early(stream: str) -> Any:
    def make(before: Any) -> Any:
        def keep(self: Any, memory: torch.Tensor, on: torch.Stream) -> None:
            if {self._in: "reading", self._out: "writing"}.get(on, "computing") != stream:
                before(self, memory, on)

        return keep

    return _replaced(StreamTransfers, "_keep_until", make)


def _without_waiting_for_pinned(which: str) -> Any:
    def make(before: Any) -> Any:
        def wait(self: Any, event: torch.Event) -> None:
            role = "emptied" if threading.current_thread().name == "hydra-writer" else "filled"
            if role != which:
                before(self, event)

        return wait

    return _replaced(Ring, "await_copy", make)


REMOVED: dict[str, Callable[[], Any]] = {
    "computing does not wait for the block to be read": lambda: _without_wait("computing", Last.READ),
    "computing does not wait for the block to be written": lambda: _without_wait("computing", Last.WRITE),
    "reading does not wait for the buffer's last use": lambda: _without_wait("reading", Last.USE),
    "reading does not wait for the buffer to be written": lambda: _without_wait("reading", Last.WRITE),
    "writing does not wait for the block's last use": lambda: _without_wait("writing", Last.USE),
    "a pinned buffer is filled while it is copied": lambda: _without_waiting_for_pinned("filled"),
    "a pinned buffer is emptied before it is copied": lambda: _without_waiting_for_pinned("emptied"),
    "memory is freed while it is computed with": lambda: _freed_too_early("computing"),
    "memory is freed while it is read": lambda: _freed_too_early("reading"),
    "memory is freed while it is written": lambda: _freed_too_early("writing"),
}


def _wrong(late: str, seed: int, steps: int = 120) -> list[str]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        return Driver(Path(folder), late, seed).run(steps)


@on_device
@pytest.mark.parametrize("late", LATE)
def test_whichever_stream_is_late_blocks_are_what_they_should_be(late: str) -> None:
    for seed in range(6):
        assert _wrong(late, seed) == []


@on_device
@pytest.mark.parametrize("removed", list(REMOVED))
def test_each_wait_that_is_removed_is_missed(removed: str) -> None:
    with REMOVED[removed]():
        assert any(_wrong(late, seed) for seed in range(6) for late in LATE[1:])


@on_device
def test_delays_change_nothing_with_the_transfer_thread() -> None:
    from tests.accelerator import backend

    backend.set_delays(11, 500)
    try:
        with tempfile.TemporaryDirectory() as folder:
            driver = Driver(Path(folder), "nothing", seed=3)
            driver.memory.close()
            driver.memory = DeviceMemory(BUDGET, torch.device(DEVICE), prefetch=True)
            driver.memory.running = driver.files
            driver.prefetch = lambda key, due: driver.memory.prefetch(  # type: ignore[method-assign]
                [(driver.files, other, due) for other in SIZES]
            )
            driver.early = []
            assert driver.run(150) == []
    finally:
        backend.set_delays(0, 0)


@on_device
def test_a_block_that_finds_no_room_is_reported_to_its_trial() -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = SpillFiles([Path(folder)], "trial")
        for key in "ab":
            files.write(key, 0, torch.zeros(4096, dtype=torch.uint8))
        files.commit(None)
        memory = DeviceMemory(5000, torch.device(DEVICE), prefetch=False)
        memory.running = files

        def full(*_: object) -> None:
            raise SpillFull(4096, [Path(folder)])

        files.write = full  # type: ignore[method-assign]
        memory.acquire(files, "a", 0.0).add_(1)
        memory.release(files, "a", 9.0, changed_at=1)
        memory.acquire(files, "b", 0.0)  # takes the place of a, which is still being written
        memory.release(files, "b", 1.0)
        with pytest.raises(SpillFull):
            memory.flush(files)
        memory.forget(files)
        memory.close()
