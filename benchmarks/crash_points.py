"""Kill a search at each of its numbered points, resume it, and compare it with the unbroken one to the last bit.

A point is an instant before a sync, a renaming, a removal, the opening of a file to write, a write, a transaction's
begin or commit, a message, or the start of a process, in the coordinator, a worker or the builder
(`hydra_tune/engine/crash_points.py`). How many points a process has differs a little between runs, as timers send
messages too; a point that a run does not reach does nothing, and is counted in `not_reached`.

    python -m benchmarks.crash_points --strategy whole              every point
    python -m benchmarks.crash_points --strategy whole --errors     raise an error at every point instead
    python -m benchmarks.crash_points --strategy shard --sample 60  a seeded sample
    python -m benchmarks.crash_points --strategy shard --at coordinator:17    one point

With `--errors`, no space, an input/output error, too many files, no memory or an error of the database is raised, once.
Expected then: the search ends by itself, without a traceback; if it fails, its last line is the error; what was
acknowledged is stored; resumed, it ends as the unbroken one. A trial may also fail with the error as its reason, which
`failed_trials` counts.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Before numpy is imported: a process with threads cannot be forked.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
# Threads of a worker that spin while they wait for each other would take most of the time on busy cores.
os.environ["OMP_WAIT_POLICY"] = "passive"

from benchmarks.forked_searches import Ended, Searches
from benchmarks.report import finish
from hydra_tune.engine.crash_points import HAPPENED, VARIABLE
from hydra_tune.storage import open_storage
from hydra_tune.storage.queries import trial_records

SPEC = """
from functools import partial
import torch
from torch import nn
from torch.utils.data import TensorDataset
import hydra_tune as ht

def build(trial):
    rows = torch.randn(60, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(rows, (rows[:, 0] > 0).long())
    width = trial.suggest_int("width", 8, 64)
    model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 2))
    optimizer = partial(torch.optim.AdamW, lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True))
    return ht.Candidate(model=model, loss=nn.functional.cross_entropy, optimizer=optimizer, train=data, valid=data,
                        batch_size=10, epochs=2)
"""
TRIALS = 2
STRATEGIES = ("whole", "shard", "pipeline", "sparse", "ist")
TWICE = 2
"""Times that a search is resumed at most."""


@dataclass
class Judged:
    """The end of a search that was disturbed at a point."""

    point: str
    happened: str = ""
    """The call before which the process was killed or an error raised; empty if the point was not reached."""
    lost: list[int] = field(default_factory=list)
    """Trials that were shown as complete and are not stored."""
    wrong: list[str] = field(default_factory=list)
    """Ways in which it did not end as it should."""
    failed: int = 0
    """Trials that failed with the injected error as their reason."""
    left: list[str] = field(default_factory=list)

    def line(self) -> str:
        lost = [f"lost {self.lost}"] if self.lost else []
        failed = [f"{self.failed} trials failed with the error"] if self.failed else []
        verdict = "; ".join([*lost, *self.wrong, *self.left, *failed]) or "as unbroken"
        return f"{self.point:>18} {self.happened or 'not reached'}: {verdict}"


class Disturbed:
    """Searches of one strategy, each in a folder of its own, and the result of the unbroken one."""

    def __init__(self, searches: Searches, place: Path, strategy: str, keep: bool) -> None:
        self._searches = searches
        self._place = place
        self._strategy = strategy
        self._keep = keep
        folder = self._make("unbroken")
        ended = searches.run_and_import(folder, self._words(folder), {VARIABLE: str(folder / "points")})
        assert ended.code == 0, ended.said
        self._expected = result(folder)
        self.points = points_of(folder)

    def judge(self, point: str) -> Judged:
        """Disturb a search at a point, resume it until it ends, and compare."""
        judged = Judged(point)
        folder = self._make(point.replace(":", "-"))
        said = self._search(folder, judged)
        if left_files(folder) and point.count(":") == 2:
            # What could not be removed is removed by the next run.
            self._run(folder, "", ["resume", "s"])
        happened = folder / "points" / HAPPENED
        judged.happened = happened.read_text() if happened.exists() else ""
        if (folder / "hydra_tune.db").exists():
            found = result(folder)
            stored = {number for number, state, *_ in found.trials if state == "COMPLETE"}
            shown = {int(number) for number in re.findall(r"^\[.*\] trial (\d+) COMPLETE ", said, re.MULTILINE)}
            judged.lost = sorted(shown - stored)
            judged.failed = sum("injected" in error for error in found.errors)
            if found != self._expected and not judged.failed:
                judged.wrong.append("another result")
        else:
            judged.wrong.append("no database")
        judged.left = [f"process {pid}" for pid in self._searches.left()] + left_files(folder)
        if not self._keep or not (judged.wrong or judged.lost or judged.left):
            shutil.rmtree(folder)
        return judged

    def _search(self, folder: Path, judged: Judged) -> str:
        """Search, and resume until the search ends well; return what was shown."""
        errors = judged.point.count(":") == 2
        words, said = self._words(folder), ""
        for turn in range(1 + TWICE):
            ended = self._run(folder, "" if turn else judged.point, words)
            said += ended.said
            (folder / f"said-{turn}").write_text(f"{words}\n{ended.said}\n{ended.code}\n")
            if ended.code is None:
                judged.wrong.append("did not end")
            shown_error = " FAILED (" in ended.said and "injected" in ended.said  # its traceback is shown once
            if "Traceback" in ended.said and not shown_error:
                judged.wrong.append("a traceback")
            if ended.code == 0:
                return said
            last = (ended.said.splitlines() or [""])[-1]
            # A search that was killed after it made its study and before it said so is found out by its name.
            known = turn > 0 and "exists already" in last
            if ended.code != -9 and not known and not (errors and turn == 0 and last.startswith("error: ")):
                judged.wrong.append(f"exit {ended.code}: {last}")
            begun = f"study s: {TRIALS}" in said or "exists already" in last
            words = ["resume", "s"] if begun else self._words(folder)
        return said

    def _words(self, folder: Path) -> list[str]:
        flags = ["--study", "s", "--trials", str(TRIALS), "--sampler", "random", "--seed", "7", "--devices", "1xcpu"]
        flags += ["--strategy", self._strategy, "--checkpoint-seconds", "0.001", "--spill", str(folder / "spill")]
        return ["search", "spec.py:build", *flags]

    def _run(self, folder: Path, point: str, words: list[str]) -> Ended:
        target = f"{folder / 'points'}:{point}" if point else str(folder / "points")
        return self._searches.run(folder, words, {VARIABLE: target})

    def _make(self, name: str) -> Path:
        folder = self._place / name
        for part in ("points", "spill"):
            (folder / part).mkdir(parents=True)
        (folder / "spec.py").write_text(SPEC)
        return folder


@dataclass(frozen=True)
class Result:
    """Everything of a search that must be the same."""

    trials: list[Any]
    """Number, state, parameters and value."""
    reports: list[Any]
    weights: list[tuple[str, str]]
    """Files and their checksums."""
    errors: list[str]


def result(folder: Path) -> Result:
    """Read the result of a search."""
    with open_storage(f"sqlite:///{folder}/hydra_tune.db", read_only=True) as storage:
        if "s" not in {study.study_name for study in storage.get_all_studies()}:
            return Result([], [], [], [])
        records = trial_records(storage, "s")
        trials = storage.get_all_trials(storage.get_study_id_from_name("s"))
    weights = sorted((folder / "hydra_tune_files" / "study-1").glob("*.safetensors"))
    return Result(
        [(each.number, each.state, each.params, each.value) for each in records],
        [sorted(trial.intermediate_values.items()) for trial in trials],
        [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in weights],
        [each.error or "" for each in records],
    )


def left_files(folder: Path) -> list[str]:
    """Return run directories, checkpoints and unfinished files that stayed behind."""
    files = [*(folder / "spill").iterdir(), *folder.glob("hydra_tune_files/*/*.checkpoints")]
    return [str(file.relative_to(folder)) for file in [*files, *folder.glob("hydra_tune_files/**/*.tmp")]]


def points_of(folder: Path) -> list[str]:
    """Return all points that the processes of an unbroken search reached."""
    found = []
    for file in sorted((folder / "points").glob("*.count"), key=lambda file: file.name.rsplit("-", 1)[0]):
        role = file.stem.rsplit("-", 1)[0]
        found += [f"{role}:{number}" for number in range(1, int(file.read_text() or 0) + 1)]
    return found


def chosen(points: list[str], options: argparse.Namespace) -> Iterator[str]:
    """Yield the points to disturb; with `--errors`, each with the number of an error."""
    chance = random.Random(options.seed)
    if options.at:
        yield options.at
        return
    size = 3 if options.quick else options.sample
    points = points if size is None else chance.sample(points, min(size, len(points)))
    part, parts = map(int, options.part.split("/"))
    for index, point in enumerate(points):
        error = chance.randrange(1000)
        if index % parts == part - 1:
            yield f"{point}:{error}" if options.errors else point


def main() -> None:
    """Disturb searches at every point, or at a sample."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", default="whole", choices=STRATEGIES)
    parser.add_argument("--errors", action="store_true", help="raise an error at each point instead of killing")
    parser.add_argument("--sample", type=int, help="how many points; default all")
    parser.add_argument("--part", default="1/1", help="K/N: only each N-th point, beginning with the K-th")
    parser.add_argument("--at", help="one point, such as coordinator:17, or coordinator:17:2 for an error")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the searches; those that went wrong are kept")
    parser.add_argument("--quick", action="store_true", help="a sample of three points")
    options = parser.parse_args()
    counts = dict.fromkeys(("points", "lost", "different", "left_over", "failed_trials", "not_reached"), 0)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="crash-points-", dir=options.keep) as name, Searches() as searches:
        place = options.keep or Path(name)
        disturbed = Disturbed(searches, place, options.strategy, keep=options.keep is not None)
        print(f"{len(disturbed.points)} points of {options.strategy}", flush=True)
        for point in chosen(disturbed.points, options):
            judged = disturbed.judge(point)
            counts["points"] += 1
            counts["lost"] += bool(judged.lost)
            counts["different"] += bool(judged.wrong)
            counts["left_over"] += bool(judged.left)
            counts["failed_trials"] += judged.failed
            counts["not_reached"] += not judged.happened
            print(judged.line(), flush=True)
        if options.keep:
            shutil.rmtree(place / "unbroken")
    rows = [(name.replace("_", " "), str(count)) for name, count in counts.items()]
    seconds = round(time.monotonic() - began, 1)
    finish(rows, {"strategy": options.strategy, "of": len(disturbed.points), **counts, "seconds": seconds})


if __name__ == "__main__":
    main()
