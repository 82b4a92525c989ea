"""Studies that an earlier version began, and that were killed in their training, are resumed by this one.

`stored/` has a study for each strategy: two trials of an MLP on breast_cancer with seed 5, as version 0.1.0 left them
before its modules moved into rooms. Some trials have a checkpoint, some have not got that far.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from hydra_tune.cli.app import run
from hydra_tune.training.checkpoint import Checkpoints

STORED = Path(__file__).parent / "stored"
UNDISTURBED = {
    "whole": (0.9735, 0.9735), "shard": (0.9823, 0.9912), "pipeline": (0.9823, 0.9912), "sparse": (0.9823, 0.9735),
    "ist": (0.9912, 0.9912), "elastic": (0.9912, 0.9823),
}  # fmt: skip
"""The accuracy of both trials in a search by that version that nobody killed."""


MARK = 0.125
"""An accuracy that no trial has."""


@pytest.mark.parametrize("study", UNDISTURBED)
def test_a_stored_study_is_resumed(study: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(STORED, tmp_path / "stored")
    database = tmp_path / "stored" / "studies.db"
    marked = mark_checkpoints(database.with_name("studies_files") / f"study-{list(UNDISTURBED).index(study) + 1}")
    assert run(["resume", study, "--storage", f"sqlite:///{database}", "--quiet", "--json"]) == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    assert [trial["state"] for trial in trials] == ["COMPLETE", "COMPLETE"]
    values = {trial["number"]: trial["value"] for trial in trials}
    assert (values[0], values[1]) == pytest.approx(UNDISTURBED[study], abs=0.03)
    assert accuracy_of_the_first_epoch(database, study, MARK) == marked, "they went on from their checkpoints"


def mark_checkpoints(folder: Path) -> set[int]:
    """Write the mark into the history of each checkpoint; the numbers of the trials that have one."""
    marked = set()
    for place in folder.glob("trial-*.checkpoints"):
        checkpoints = Checkpoints(place)
        newest = checkpoints.newest()
        assert newest is not None
        newest.state["history"][0]["accuracy"] = MARK
        checkpoints.save(newest.step, newest.state)
        marked.add(int(place.stem.removeprefix("trial-")))
    assert marked
    return marked


def accuracy_of_the_first_epoch(database: Path, study: str, value: float) -> set[int]:
    """The trials of a study whose first epoch has this accuracy on record."""
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute(
            "SELECT m.number FROM hydra_metrics m JOIN studies s USING (study_id)"
            " WHERE s.study_name = ? AND m.name = 'accuracy' AND m.epoch = 0 AND m.value = ?", (study, value),
        )  # fmt: skip
        return {number for (number,) in rows}
