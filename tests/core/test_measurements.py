"""Measurements on disk are optional: one that cannot be read or written is measured again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hydra_tune.core.measurements import keep, kept

pytestmark = pytest.mark.smoke


def test_what_was_kept_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "rates.json"
    keep(path, {"copy": 1.5})
    assert kept(path) == {"copy": 1.5}
    assert os.listdir(path.parent) == ["rates.json"]


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", "\x00"])
def test_what_is_not_whole_counts_as_not_there(tmp_path: Path, content: str) -> None:
    (tmp_path / "rates.json").write_text(content)
    assert kept(tmp_path / "rates.json") is None
    assert kept(tmp_path / "none.json") is None


def test_a_place_that_cannot_be_written_costs_nothing_but_the_measurement(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    keep(tmp_path / "file" / "rates.json", {"copy": 1.5})
    assert (tmp_path / "file").read_text() == "in the way"
    (tmp_path / "taken.json").mkdir()
    keep(tmp_path / "taken.json", {"copy": 1.5})
    assert not list(tmp_path.glob("*.tmp"))


def test_the_unfinished_file_of_a_killed_process_goes_with_the_next_measurement(tmp_path: Path) -> None:
    (tmp_path / "rates.4711.tmp").write_text("{")
    (tmp_path / "others.4711.tmp").write_text("{")
    keep(tmp_path / "rates.json", {"copy": 1.5})
    assert sorted(os.listdir(tmp_path)) == ["others.4711.tmp", "rates.json"]
