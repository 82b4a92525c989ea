"""The spill store's files: the last commit stays intact whenever the writing process is killed."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from hydra_tune.spill import places as spill
from hydra_tune.spill.places import SpillFull
from hydra_tune.spill.store import SpillFiles


def block(value: int, size: int = 1000) -> torch.Tensor:
    return torch.full((size,), value, dtype=torch.uint8)


def content(files: SpillFiles, key: str) -> torch.Tensor:
    stored = files.find(key)
    assert stored is not None
    found = torch.empty(stored.size, dtype=torch.uint8)
    assert files.read(key, found) == stored.version
    return found


def holds(files: SpillFiles, key: str, value: int, size: int = 1000) -> bool:
    return torch.equal(content(files, key), block(value, size))


def test_what_is_written_is_read_and_counts_after_the_commit(tmp_path: Path) -> None:
    files = SpillFiles([tmp_path], "trial")
    files.write("w/0", 1, block(1))
    assert holds(files, "w/0", 1)
    assert not SpillFiles([tmp_path], "trial").committed, "another process does not see it yet"
    files.commit({"epoch": 1})
    other = SpillFiles([tmp_path], "trial")
    assert holds(other, "w/0", 1)
    assert other.notes == {"epoch": 1}
    assert (files.written_bytes, files.read_bytes, other.read_bytes) == (1000, 1000, 1000)


def test_the_committed_version_stays_until_the_next_commit(tmp_path: Path) -> None:
    files = SpillFiles([tmp_path], "trial")
    files.write("w/0", 1, block(1))
    files.commit("first")
    for version in (2, 3, 4):
        files.write("w/0", version, block(version))
        assert holds(files, "w/0", version)
        assert holds(SpillFiles([tmp_path], "trial"), "w/0", 1)
    assert len(list((tmp_path / "trial").glob("w-0.*"))) == 2, "two slots, however often it is written"
    files.commit("second")
    assert holds(SpillFiles([tmp_path], "trial"), "w/0", 4)
    files.write("w/0", 5, block(5, 400))
    files.reload()
    assert holds(files, "w/0", 4), "what was not committed is forgotten"
    assert files.notes == "second"
    files.write("w/0", 6, block(6, 400))
    files.commit("smaller")
    assert holds(SpillFiles([tmp_path], "trial"), "w/0", 6, 400)


def test_another_process_takes_over_after_a_commit(tmp_path: Path) -> None:
    one, other = SpillFiles([tmp_path], "trial"), SpillFiles([tmp_path], "trial")
    for turn in range(1, 6):
        writer, reader = (one, other) if turn % 2 else (other, one)
        writer.reload()
        writer.write("w/0", turn, block(turn))
        writer.commit(turn)
        reader.reload()
        assert holds(reader, "w/0", turn)
        assert reader.notes == turn


def test_a_deleted_block_goes_with_the_commit_and_can_be_written_anew(tmp_path: Path) -> None:
    files = SpillFiles([tmp_path], "trial")
    files.write("kept", 1, block(1))
    files.write("gone", 1, block(2))
    files.commit(None)
    files.write("gone", 2, block(3))
    files.delete("gone")
    assert files.find("gone") is None
    assert holds(SpillFiles([tmp_path], "trial"), "gone", 2), "the commit still has it"
    files.commit(None)
    assert [path.name for path in (tmp_path / "trial").iterdir() if "gone" in path.name] == []
    files.write("gone", 3, block(4))
    files.delete("kept")
    files.write("kept", 3, block(5))
    files.commit(None)
    again = SpillFiles([tmp_path], "trial")
    assert holds(again, "gone", 4)
    assert holds(again, "kept", 5)
    files.write("never", 1, block(6))
    files.delete("never")
    files.delete("unheard of")
    assert files.find("never") is None
    files.remove()
    assert not (tmp_path / "trial").exists()


def test_a_copy_is_a_block_of_its_own(tmp_path: Path) -> None:
    files = SpillFiles([tmp_path], "trial")
    files.write("w/0", 1, block(1))
    files.commit(None)
    files.copy("w/0", "k/w/0")
    files.write("empty", 1, block(0, 0))
    files.copy("empty", "k/empty")
    files.write("w/0", 2, block(2))
    files.commit(None)
    assert holds(files, "k/w/0", 1)
    assert holds(files, "w/0", 2)
    assert holds(files, "k/empty", 0, 0)


def test_remove_leaves_nothing(tmp_path: Path) -> None:
    places = [tmp_path / "fast", tmp_path / "slow"]
    for place in places:
        place.mkdir()
    files = SpillFiles(places, "trial")
    files.write("w/0", 1, block(1))
    files.commit(None)
    files.remove()
    assert [list(place.iterdir()) for place in places] == [[], []]


def write_turns(folder: Path, first: int, say: int) -> None:
    files = SpillFiles([folder], "trial")
    for turn in range(first, 256):
        for key in range(4):
            files.write(f"w/{key}", turn, block(turn, 200_000))
        if turn % 3 == 0:
            files.delete("extra")
        else:
            files.write("extra", turn, block(turn))
        files.commit(turn)
        os.write(say, bytes([turn]))


def test_a_process_killed_in_the_middle_of_writing_leaves_the_last_commit_whole(tmp_path: Path) -> None:
    """Twenty times, each at another point of a later turn; the next process goes on from there."""
    instants = random.Random(3)
    turn = 0
    for _ in range(20):
        hear, say = os.pipe()
        child = os.fork()
        if not child:
            write_turns(tmp_path, turn + 1, say)
            os._exit(0)
        os.close(say)
        said = [os.read(hear, 1)[0] for _ in range(instants.randint(1, 4))][-1]
        for _ in range(instants.randint(0, 20_000)):
            pass  # for a while: the child is somewhere in its next turns
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "it was writing to the end"
        os.close(hear)
        files = SpillFiles([tmp_path], "trial")
        assert files.notes >= said
        turn = files.notes
        assert all(holds(files, f"w/{key}", turn, 200_000) for key in range(4))
        assert (files.find("extra") is None) == (turn % 3 == 0)
        if turn % 3:
            assert holds(files, "extra", turn)


# No room


def test_a_place_without_room_is_passed_over(tmp_path: Path) -> None:
    with small_place(tmp_path) as small:
        large = tmp_path / "large"
        large.mkdir()
        files = SpillFiles([small, large], "trial")
        for i in range(6):
            files.write(f"w/{i}", 1, block(i, 300_000))
        files.commit("all")
        places = [stored.place for stored in files.committed.values()]
        assert places[0] == 0
        assert places[-1] == 1
        again = SpillFiles([small, large], "trial")
        assert all(holds(again, f"w/{i}", i, 300_000) for i in range(6))
        for i in range(6):
            files.write(f"w/{i}", 2, block(10 + i, 300_000))
        assert all(holds(SpillFiles([small, large], "trial"), f"w/{i}", i, 300_000) for i in range(6))
        files.commit("again")
        assert all(holds(files, f"w/{i}", 10 + i, 300_000) for i in range(6))
        again.close()
        files.close()


def test_no_room_anywhere_names_the_places_and_the_bytes_and_the_commit_stays(tmp_path: Path) -> None:
    with small_place(tmp_path) as small:
        files = SpillFiles([small], "trial")
        files.write("w/0", 1, block(1, 300_000))
        files.commit("whole")
        with pytest.raises(SpillFull, match=rf"no room for 900000 bytes in {small} \(.*--spill.*resumed\)"):
            files.write("w/1", 1, block(2, 900_000))
        assert not list((small / "trial").glob("w-1*")), "nothing half written is left"
        files.reload()
        assert holds(files, "w/0", 1, 300_000)
        with pytest.raises(SpillFull, match=rf"no room for \d+ bytes in {small}"):
            files.commit("x" * 2_000_000)
        assert SpillFiles([small], "trial").notes == "whole"
        files.close()


def test_a_little_of_the_last_place_stays_free(tmp_path: Path) -> None:
    with small_place(tmp_path) as small:
        files = SpillFiles([small], "trial")
        files.write("w/0", 1, block(1, 900_000))
        with pytest.raises(SpillFull):
            files.write("w/1", 1, block(2, 100_000))
        assert os.statvfs(small).f_bavail * os.statvfs(small).f_frsize > 100_000, "it would have fitted"
        files.close()


def test_whoever_writes_after_a_trial_was_removed_leaves_nothing_behind(tmp_path: Path) -> None:
    files = SpillFiles([tmp_path], "trial")
    files.write("w/0", 1, block(1))
    files.commit(None)
    late = SpillFiles([tmp_path], "trial")
    files.remove()
    with pytest.raises(FileNotFoundError, match="its trial has ended"):
        late.write("w/1", 1, block(2))
    with pytest.raises(FileNotFoundError, match="its trial has ended"):
        late.commit(None)
    assert list(tmp_path.iterdir()) == []


class small_place:
    """A directory with room for one MiB, where mounting is allowed; else the test is left out."""

    def __init__(self, folder: Path) -> None:
        self.place = folder / "small"

    def __enter__(self) -> Path:
        self.place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(self.place)], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip("mounting is not allowed here")
        return self.place

    def __exit__(self, *_error: object) -> None:
        # Lazily: a file that is still open must not keep it.
        subprocess.run(["umount", "-l", str(self.place)], check=True)


LIMITED = """
import sys
import torch
from pathlib import Path
from hydra_tune.spill.store import SpillFiles
from hydra_tune.spill.places import SpillFull, write_whole
files = SpillFiles([Path(sys.argv[1])], "trial")
files.write("small", 1, torch.ones(1000, dtype=torch.uint8))
files.commit("whole")
try:
    files.write("large", 1, torch.ones(500_000, dtype=torch.uint8))
except SpillFull as error:
    print(error)
try:
    write_whole(Path(sys.argv[1]) / "trial" / "kit", bytes(200_000))
except SpillFull as error:
    print(error)
"""


def test_a_file_that_may_not_grow_is_no_room_too(tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], preexec_fn=limit, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"there is no room for 500000 bytes in {tmp_path}" in done.stdout
    assert f"there is no room for 200000 bytes in {tmp_path}" in done.stdout
    assert sorted(os.listdir(tmp_path / "trial")) == ["index.json", "small.0"]
    assert SpillFiles([tmp_path], "trial").notes == "whole"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no tmpfs at /dev/shm")
@pytest.mark.parametrize(("available", "where"), [(900, 0), (99, 1)], ids=["memory to spare", "little memory left"])
def test_host_memory_is_not_used_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: int, where: int
) -> None:
    """A tmpfs may be as large as the memory: what is kept for everybody else counts, not its own free room."""
    mebibyte = 2**20
    monkeypatch.setattr(spill, "memory", lambda: (available * mebibyte, 1000 * mebibyte))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as host:
        files = SpillFiles([Path(host), tmp_path], "trial")
        files.write("w/0", 1, block(1))
        stored = files.find("w/0")
        assert stored is not None
        assert stored.place == where
        files.remove()


def test_what_lies_in_the_files_of_each_trial_by_tier(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        places = [Path(shared), tmp_path]
        assert spill.lying([*places, tmp_path / "not-there"]) == {}
        (tmp_path / "data-0").write_bytes(bytes(5000))  # not a trial's
        files = SpillFiles(places, "trial-7-abc")
        files.write("w/0", 1, block(1))
        files.commit(None)
        index = (places[0] / "trial-7-abc" / "index.json").stat().st_size
        assert spill.lying(places) == {7: spill.Lying(host=1000 + index)}
        files.write("w/0", 2, block(2))
        assert spill.lying(places) == {7: spill.Lying(host=2000 + index)}, "the committed version lies there too"
        below = SpillFiles([tmp_path], "trial-12-abc/part-3")
        below.write("w/0", 1, block(1, 300))
        assert spill.lying(places) == {7: spill.Lying(host=2000 + index), 12: spill.Lying(disk=300)}
        files.remove()
        assert spill.lying(places) == {12: spill.Lying(disk=300)}
