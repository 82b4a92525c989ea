"""Directories of a search: owned by a lock that is held, and made again when something else removes them."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hydra_tune.coordinator.run_directories import RunDirectories, abandoned_directories, run_directories
from hydra_tune.core.errors import InputError
from hydra_tune.storage import open_storage
from hydra_tune.storage.queries import trial_attempts
from tests.fault.searches import COMMON, SPEC, run, started, values, wait_for, wait_for_checkpoint

LOOK = "from pathlib import Path; from tests.fault.test_directories import found; print(*found(Path.cwd()))"


def found(place: Path) -> list[str]:
    return [entry.name for entry in abandoned_directories(place)]


def test_a_live_search_in_another_process_namespace_keeps_its_directory(tmp_path: Path) -> None:
    """A container that shares the place has other process ids, and cannot see ours."""
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode != 0:
        pytest.skip("no process namespace can be made here")
    with run_directories(str(tmp_path)) as directories:
        (path,) = directories.paths
        seen = subprocess.run(
            [*apart, sys.executable, "-c", LOOK], cwd=tmp_path, capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": str(SPEC.parents[2])},
        )  # fmt: skip
        assert (seen.returncode, seen.stdout.split()) == (0, []), seen.stderr
        with run_directories(str(tmp_path)):
            assert os.path.isdir(path)
    assert not list(tmp_path.iterdir())


def test_a_directory_without_a_holder_is_removed_by_the_next_search(tmp_path: Path) -> None:
    left, unnamed = tmp_path / f"hydra-tune-search-{os.getpid()}-left", tmp_path / "hydra-tune-new-left"
    for directory in (left, unnamed):
        directory.mkdir()
    (left / "block").write_text("bytes")
    (tmp_path / "hydra-tune-search-link").symlink_to(left)
    assert sorted(found(tmp_path)) == [unnamed.name, left.name], "not a link"
    with run_directories(str(tmp_path)):
        assert not left.exists()
        assert not unnamed.exists()


def test_a_directory_is_locked_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another search that looks in between removes what is unlocked: then another directory is made."""
    rename, raced = os.rename, []

    def rename_late(before: str, after: str) -> None:
        if not raced:
            raced.append(before)
            os.rmdir(before)
        assert found(tmp_path) == [], "one that is locked is never found"
        rename(before, after)

    monkeypatch.setattr("os.rename", rename_late)
    with run_directories(str(tmp_path)) as directories:
        assert [str(entry) for entry in tmp_path.iterdir()] == list(directories.paths)
    assert raced


def test_a_removed_directory_is_made_again_and_locked(tmp_path: Path) -> None:
    with run_directories(str(tmp_path)) as directories:
        (path,) = directories.paths
        (Path(path) / "source").touch()
        assert not directories.restore("source")
        shutil.rmtree(path)
        assert directories.restore("source")
        assert os.stat(path).st_mode & 0o777 == 0o700
        assert found(tmp_path) == []
        assert directories.losses == 1
        shutil.rmtree(tmp_path)
        with pytest.raises(InputError, match=r"no directory can be made in .*spill"):
            directories.restore("source")
    tmp_path.mkdir()


def test_a_file_system_without_locks_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (tmp_path / "hydra-tune-search-1-other").mkdir()
    directories = RunDirectories([str(tmp_path)])
    assert len(list(tmp_path.iterdir())) == 2, "whose it is cannot be known"
    directories.remove()


@pytest.mark.parametrize("strategy", ["whole", "shard"])
def test_a_search_whose_directory_is_removed_ends_as_if_nothing_had_happened(tmp_path: Path, strategy: str) -> None:
    spill = tmp_path / "spill"
    spill.mkdir()
    flags = [*COMMON, "--study", "s", "--strategy", strategy]
    search = ["search", f"{SPEC}:build", *flags]
    unbroken = tmp_path / "unbroken"
    unbroken.mkdir()
    assert run(*search, folder=unbroken).returncode == 0
    with started(*search, "--spill", str(spill), folder=tmp_path) as process:
        wait_for_checkpoint(tmp_path)
        (directory,) = wait_for(lambda: list(spill.glob("hydra-tune-search-*")), "its directory")
        shutil.rmtree(directory)
        _, errors = process.communicate()
    assert process.returncode == 0, errors
    assert "a directory of this search was removed and is made again" in errors
    assert values(tmp_path, "s") == values(unbroken, "s")
    with open_storage(f"sqlite:///{tmp_path}/hydra_tune.db", read_only=True) as storage:
        states: list[Any] = [a.state for number in range(3) for a in trial_attempts(storage, "s", number)]
    assert "LOST" in states
    assert "FAILED" not in states
    assert not list(spill.iterdir())
