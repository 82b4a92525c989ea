"""A device's memory under its budget: a block is read as it was last written, whatever was evicted in between."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hydra_tune.spill.block import OutOfDeviceMemory
from hydra_tune.spill.device_memory import DeviceMemory
from hydra_tune.spill.places import SpillFull
from hydra_tune.spill.store import SpillFiles
from tests.fault.searches import wait_for

CPU = torch.device("cpu")


@contextmanager
def memory_of(budget: int, *, prefetch: bool = False) -> Iterator[DeviceMemory]:
    memory = DeviceMemory(budget, CPU, prefetch=prefetch)
    try:
        yield memory
    finally:
        memory.close()


def trial(folder: Path, name: str = "trial", **sizes: int) -> SpillFiles:
    """Files with a committed block of each size."""
    files = SpillFiles([folder], name)
    for number, (key, size) in enumerate(sizes.items()):
        files.write(key, 0, torch.full((size,), number, dtype=torch.uint8))
    files.commit(None)
    return files


def use(memory: DeviceMemory, files: SpillFiles, key: str, due: float) -> torch.Tensor:
    content = memory.acquire(files, key, due)
    memory.release(files, key, due)
    return content


def test_a_block_is_read_once_while_there_is_room(tmp_path: Path) -> None:
    files = trial(tmp_path, a=100, b=100)
    with memory_of(250) as memory:
        for _ in range(3):
            assert bool((use(memory, files, "b", 1.0) == 1).all())
        assert (memory.hits, memory.misses, files.read_bytes) == (2, 1, 100)


def test_the_block_that_is_due_last_goes_first(tmp_path: Path) -> None:
    files = trial(tmp_path, a=100, b=100, c=100, d=100)
    with memory_of(300) as memory:
        memory.running = files
        for key, due in (("a", 5.0), ("b", 9.0), ("c", 7.0)):
            use(memory, files, key, due)
        use(memory, files, "d", 6.0)
        assert [key for key in "abcd" if memory.holds(files, key)] == ["a", "c", "d"]
        use(memory, files, "b", 4.0)
        assert [key for key in "abcd" if memory.holds(files, key)] == ["a", "b", "d"]


def test_blocks_of_other_trials_go_before_those_of_the_one_that_runs(tmp_path: Path) -> None:
    mine, other = trial(tmp_path, "mine", a=100, b=100), trial(tmp_path, "other", a=100)
    with memory_of(200) as memory:
        memory.running = mine
        use(memory, mine, "a", 1000.0)
        use(memory, other, "a", 1.0)
        use(memory, mine, "b", 2000.0)
        assert memory.holds(mine, "a")
        assert not memory.holds(other, "a")


def test_a_changed_block_is_written_before_it_goes_and_an_unchanged_one_is_not(tmp_path: Path) -> None:
    files = trial(tmp_path, a=100, b=100)
    before = files.written_bytes
    with memory_of(100) as memory:
        memory.acquire(files, "a", 0.0).fill_(42)
        memory.release(files, "a", 1.0, changed_at=7)
        use(memory, files, "b", 2.0)
        assert files.written_bytes - before == 100
        assert bool((use(memory, files, "a", 3.0) == 42).all())
        stored = files.find("a")
        assert stored is not None
        assert stored.version == 7
        use(memory, files, "b", 2.0)
        assert files.written_bytes - before == 100


def test_blocks_in_use_beyond_the_budget_are_out_of_memory_and_the_rest_goes_on(tmp_path: Path) -> None:
    files = trial(tmp_path, a=100, b=100, c=100)
    with memory_of(250) as memory:
        memory.acquire(files, "a", 0.0)
        memory.reserve(100)
        with pytest.raises(OutOfDeviceMemory, match="a step needs 300 B of a device budget of 250 B"):
            memory.acquire(files, "b", 0.0)
        with pytest.raises(OutOfDeviceMemory):
            memory.new(files, "n", 100)
        with pytest.raises(OutOfDeviceMemory):
            memory.adopt(files, "n", torch.zeros(100, dtype=torch.uint8), 0.0)
        with pytest.raises(OutOfDeviceMemory):
            memory.reserve(151)
        assert not memory.holds(files, "b")
        assert not memory.holds(files, "n")
        memory.release(files, "a", 1.0)
        memory.reserve(0)
        assert bool((use(memory, files, "b", 0.0) == 1).all())
        assert memory.peak <= 250


def test_flush_and_forget(tmp_path: Path) -> None:
    files = trial(tmp_path, a=100, b=100)
    with memory_of(300) as memory:
        for key, value in (("a", 5), ("b", 6)):
            memory.acquire(files, key, 0.0).fill_(value)
            memory.release(files, key, 1.0, changed_at=1)
        memory.flush(files)
        files.commit(None)
        other = SpillFiles([tmp_path], "trial")
        assert bool((read(other, "a") == 5).all())
        # Another process goes on with one of them.
        other.write("b", 2, torch.full((100,), 9, dtype=torch.uint8))
        other.commit(None)
        files.reload()
        memory.forget(files, outdated_only=True)
        assert memory.holds(files, "a")
        assert not memory.holds(files, "b")
        assert bool((use(memory, files, "b", 1.0) == 9).all())
        memory.acquire(files, "a", 0.0).fill_(7)
        memory.release(files, "a", 1.0, changed_at=3)
        memory.forget(files)
        assert bool((use(memory, files, "a", 1.0) == 5).all()), "what was not flushed is gone"


def read(files: SpillFiles, key: str) -> torch.Tensor:
    stored = files.find(key)
    assert stored is not None
    found = torch.empty(stored.size, dtype=torch.uint8)
    files.read(key, found)
    return found


def test_no_room_to_spill_is_raised_where_the_room_was_wanted_and_the_block_stays(tmp_path: Path) -> None:
    class Full(SpillFiles):
        def write(self, key: str, version: int, block: torch.Tensor) -> None:
            raise SpillFull(block.numel(), self.places)

    trial(tmp_path, a=100, b=100)
    files = Full([tmp_path], "trial")
    with memory_of(100) as memory:
        memory.acquire(files, "a", 0.0).fill_(3)
        memory.release(files, "a", 1.0, changed_at=1)
        with pytest.raises(SpillFull):
            memory.acquire(files, "b", 0.0)
        assert bool((use(memory, files, "a", 1.0) == 3).all())
        memory.forget(files)


def test_what_an_ended_trial_has_here_costs_nobody_else_a_failure(tmp_path: Path) -> None:
    ended, other = trial(tmp_path, "ended", a=100), trial(tmp_path, "other", b=100, c=100)
    with memory_of(250) as memory:
        memory.running = ended
        memory.acquire(ended, "a", 1.0)
        memory.release(ended, "a", 1.0, changed_at=1)
        memory.adopt(ended, "x", torch.ones(100, dtype=torch.uint8), 2.0)
        SpillFiles([tmp_path], "ended").remove()  # by somebody else: this device has not heard of it yet
        memory.running = other
        for key in "bc":
            use(memory, other, key, 1.0)
        assert not memory.holds(ended, "a")
        assert list(tmp_path.iterdir()) == [tmp_path / "other"]
        memory.running = ended
        memory.adopt(ended, "y", torch.ones(100, dtype=torch.uint8), 2.0)
        with pytest.raises(FileNotFoundError, match="its trial has ended"):
            memory.flush(ended)
        memory.forget(ended)


def test_what_is_prefetched_is_there_and_brings_nothing_out_that_is_due_sooner(tmp_path: Path) -> None:
    files = trial(tmp_path, a=100, b=100, c=100)
    with memory_of(200, prefetch=True) as memory:
        memory.running = files
        use(memory, files, "a", 1.0)
        memory.prefetch([(files, "b", 2.0), (files, "c", 3.0)])
        wait_for(lambda: not memory._wanted, "what is wanted")
        memory.acquire(files, "b", 2.0)
        assert (memory.hits, memory.misses) == (1, 1)
        memory.release(files, "b", 2.0)
        memory.close()
        assert memory.holds(files, "a")
        assert memory.holds(files, "b")
        assert not memory.holds(files, "c")
        assert memory.peak <= 200


def test_closing_ends_the_transfer_thread_whatever_it_does(tmp_path: Path) -> None:
    files = trial(tmp_path, **{f"k{i}": 1000 for i in range(50)})
    before = set(threading.enumerate())
    memory = DeviceMemory(10_000, CPU, prefetch=True)
    memory.running = files
    memory.prefetch([(files, f"k{i}", float(i)) for i in range(50)])
    memory.close()
    memory.close()
    assert set(threading.enumerate()) == before


class HeldReads(SpillFiles):
    """A disk of which reads take until `go`."""

    def __init__(self, folder: Path) -> None:
        super().__init__([folder], "trial")
        self.reading, self.go = threading.Event(), threading.Event()

    def read(self, key: str, block: torch.Tensor) -> int:
        self.reading.set()
        assert self.go.wait(30)
        return super().read(key, block)


def test_what_is_left_of_an_earlier_wish_is_not_brought_in(tmp_path: Path) -> None:
    trial(tmp_path, a=100, b=100, c=100)
    files = HeldReads(tmp_path)
    with memory_of(300, prefetch=True) as memory:
        memory.running = files
        memory.prefetch([(files, "a", 1.0), (files, "b", 1.0)])
        assert files.reading.wait(30)
        memory.prefetch([(files, "c", 2.0)])
        files.go.set()
        wait_for(lambda: memory.holds(files, "c"), "the newest wish")
        memory.close()
        assert memory.holds(files, "a"), "it was on its way"
        assert not memory.holds(files, "b")


class SlowFiles(SpillFiles):
    """A disk that takes until `go` for each write."""

    def __init__(self, folder: Path) -> None:
        super().__init__([folder], "trial")
        self.writing, self.go = threading.Event(), threading.Event()

    def write(self, key: str, version: int, block: torch.Tensor) -> None:
        self.writing.set()
        assert self.go.wait(30)
        super().write(key, version, block)


@contextmanager
def evicting_in_the_background(folder: Path) -> Iterator[tuple[DeviceMemory, SlowFiles]]:
    """Memory of two blocks of 100 bytes: `a` is in use, `x` is just being written to make room for `b`.

    The write ends once somebody waits for it, or at the end.
    """
    trial(folder, a=100, b=100)
    files = SlowFiles(folder)
    with memory_of(200, prefetch=True) as memory:
        memory.running = files
        memory.acquire(files, "a", 0.0)
        memory.adopt(files, "x", torch.full((100,), 77, dtype=torch.uint8), 100.0)
        memory.prefetch([(files, "b", 5.0)])
        assert files.writing.wait(30)
        over = threading.Event()

        def let_it_end() -> None:
            while not memory._news._waiters and not over.wait(0.001):  # type: ignore[attr-defined]
                pass
            files.go.set()

        helper = threading.Thread(target=let_it_end)
        helper.start()
        try:
            yield memory, files
        finally:
            over.set()
            helper.join()


def test_room_that_the_transfer_thread_is_making_is_waited_for(tmp_path: Path) -> None:
    with evicting_in_the_background(tmp_path) as (memory, files):
        memory.new(files, "n", 100).fill_(1)
        memory.release(files, "n", 0.0, changed_at=1)
        memory.release(files, "a", 0.0)
        assert bool((use(memory, files, "x", 1.0) == 77).all())
        assert memory.peak <= 200


def test_a_block_can_be_discarded_while_the_transfer_thread_writes_it(tmp_path: Path) -> None:
    with evicting_in_the_background(tmp_path) as (memory, files):
        memory.discard(files, "x")
        assert not memory.holds(files, "x")
        assert files.find("x") is None


def test_a_trial_can_be_forgotten_while_the_transfer_thread_writes_a_block(tmp_path: Path) -> None:
    with evicting_in_the_background(tmp_path) as (memory, files):
        memory.release(files, "a", 0.0)
        memory.forget(files)
        assert not memory.holds(files, "a")
        assert not memory.holds(files, "x")


def test_a_block_that_is_wanted_while_it_is_written_stays(tmp_path: Path) -> None:
    with evicting_in_the_background(tmp_path) as (memory, files):
        assert bool((memory.acquire(files, "x", 1.0) == 77).all())
        assert files.read_bytes == 100, "only the block in use was read"
        memory.release(files, "x", 1.0)


class Memory(RuleBasedStateMachine):
    """Random use of blocks by two trials, against a model of what each block holds."""

    prefetch = False

    @initialize(budget=st.integers(300, 1200))
    def begin(self, budget: int) -> None:
        self.folder = TemporaryDirectory()
        self.memory = DeviceMemory(budget, CPU, prefetch=self.prefetch)
        self.files = [SpillFiles([Path(self.folder.name)], name) for name in ("one", "two")]
        self.contents: dict[tuple[int, str], torch.Tensor] = {}
        self.pinned: dict[tuple[int, str], torch.Tensor] = {}
        self.version = 0
        self.random = random.Random(budget)

    def teardown(self) -> None:
        if hasattr(self, "memory"):
            for key in list(self.pinned):
                self.memory.release(self.files[key[0]], key[1], 0.0)
            for key in self.contents:
                self.pinned.clear()
                self.check(key)
            self.memory.close()
            self.folder.cleanup()

    def some(self, index: int, *, pinned: bool) -> tuple[int, str] | None:
        keys = sorted(key for key in self.contents if (key in self.pinned) == pinned)
        return keys[index % len(keys)] if keys else None

    def bytes_of(self, size: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.random.randbytes(size)), dtype=torch.uint8)

    def check(self, key: tuple[int, str]) -> None:
        content = self.memory.acquire(self.files[key[0]], key[1], 0.0)
        assert torch.equal(content, self.contents[key])
        self.memory.release(self.files[key[0]], key[1], 0.0)

    @rule(of=st.integers(0, 1), size=st.integers(1, 300), due=st.integers(0, 20))
    def make(self, of: int, size: int, due: int) -> None:
        key = (of, f"n{len(self.contents)}-{self.version}")
        fresh = self.bytes_of(size)
        try:
            self.memory.new(self.files[of], key[1], size).copy_(fresh)
        except OutOfDeviceMemory:
            return
        self.version += 1
        self.memory.release(self.files[of], key[1], float(due), changed_at=self.version)
        self.contents[key] = fresh

    @rule(of=st.integers(0, 1), size=st.integers(1, 300), due=st.integers(0, 20))
    def adopt(self, of: int, size: int, due: int) -> None:
        key = (of, f"a{len(self.contents)}-{self.version}")
        fresh = self.bytes_of(size)
        try:
            self.memory.adopt(self.files[of], key[1], fresh.clone(), float(due))
        except OutOfDeviceMemory:
            return
        self.version += 1
        self.contents[key] = fresh

    @rule(index=st.integers(0, 50), due=st.integers(0, 20))
    def acquire(self, index: int, due: int) -> None:
        key = self.some(index, pinned=False)
        if key is None:
            return
        try:
            content = self.memory.acquire(self.files[key[0]], key[1], float(due))
        except OutOfDeviceMemory:
            assert self.pinned, "alone, every block fits"
            return
        assert torch.equal(content, self.contents[key])
        self.pinned[key] = content

    @rule(index=st.integers(0, 50), due=st.integers(0, 20), change=st.booleans())
    def release(self, index: int, due: int, change: bool) -> None:
        key = self.some(index, pinned=True)
        if key is None:
            return
        content = self.pinned.pop(key)
        assert torch.equal(content, self.contents[key]), "a block in use stays as it is"
        changed_at = None
        if change:
            content.copy_(self.bytes_of(content.numel()))
            self.contents[key] = content.clone()
            self.version += 1
            changed_at = self.version
        self.memory.release(self.files[key[0]], key[1], float(due), changed_at=changed_at)

    @rule(index=st.integers(0, 50))
    def discard(self, index: int) -> None:
        key = self.some(index, pinned=False)
        if key is not None:
            self.memory.discard(self.files[key[0]], key[1])
            del self.contents[key]
            assert not self.memory.holds(self.files[key[0]], key[1])

    @rule(of=st.integers(0, 1))
    def commit(self, of: int) -> None:
        self.memory.flush(self.files[of])
        self.files[of].commit(None)
        committed = SpillFiles([Path(self.folder.name)], self.files[of].places[0].name)
        for (number, key), expected in self.contents.items():
            if number == of:
                assert torch.equal(read(committed, key), expected)

    @rule(of=st.integers(0, 1))
    def run(self, of: int) -> None:
        self.memory.running = self.files[of]

    @rule(size=st.integers(0, 200))
    def reserve(self, size: int) -> None:
        try:
            self.memory.reserve(size)
        except OutOfDeviceMemory:
            assert self.pinned
        self.memory.reserve(0)

    @rule(index=st.integers(0, 50), count=st.integers(1, 6), due=st.integers(0, 20))
    def fetch_ahead(self, index: int, count: int, due: int) -> None:
        keys = sorted(self.contents)
        wanted = (keys + keys)[index % (len(keys) or 1) :][:count]
        self.memory.prefetch([(self.files[of], key, float(due)) for of, key in wanted])

    @invariant()
    def within_the_budget(self) -> None:
        if hasattr(self, "memory"):
            assert self.memory.peak <= self.memory.budget


class MemoryWithTransferThread(Memory):
    prefetch = True


often = settings(
    max_examples=120, stateful_step_count=50, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
TestMemory = Memory.TestCase
TestMemory.settings = often
TestMemoryWithTransferThread = MemoryWithTransferThread.TestCase
TestMemoryWithTransferThread.settings = often
