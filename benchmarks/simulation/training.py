"""Training in simulated workers, as arithmetic: a batch too many or too few changes every value.

State has the life of the real one: what is resident dies with its worker, commits live in the run's files, checkpoints
and weights on disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from optuna.distributions import FloatDistribution, IntDistribution

from hydra_tune.strategies.epochs import Loaded, SavedCheckpoint
from hydra_tune.strategies.shard.cut import ShardCut, SliceDone, Spilled
from hydra_tune.training.builds import Blueprint, Built
from hydra_tune.training.checkpoint_files import CheckpointFiles
from hydra_tune.training.progress import Progress
from hydra_tune.training.remote_trial import TrialInfo

SPACE = {"width": IntDistribution(1, 64), "lr": FloatDistribution(1e-4, 1.0, log=True)}
MASK = 2**64 - 1

Work = Generator[tuple[str, tuple[Any, ...], bool], Any, Any]
"""Yields calls to the coordinator: name, arguments, and True if an answer is awaited; returns the unit's value."""


@dataclass
class State:
    """A trial in training."""

    number: int
    """Stands for every weight."""
    epoch: int = 0
    batch: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    kept: int | None = None

    def copy(self) -> State:
        return State(self.number, self.epoch, self.batch, list(self.history), self.kept)

    def train(self, seed: int) -> None:
        self.number = (self.number * 6364136223846793005 + seed + 31 * self.epoch + self.batch) & MASK
        self.batch += 1

    def end_epoch(self) -> dict[str, float]:
        metrics = {"loss": self.number / MASK}
        self.history.append(metrics)
        self.epoch, self.batch = self.epoch + 1, 0
        return metrics


@dataclass
class Files:
    """A trial's files in the spill store: its last commit."""

    state: State
    commits: int = 0


@dataclass
class Resident:
    """The state of one attempt in a worker."""

    state: State
    seed: int
    files: Files | None = None
    commits: int = 0


@dataclass(frozen=True)
class Shape:
    """Size of the trials of a simulation."""

    epochs: int
    batches: int
    keep: str
    objective: bool
    """True if `build` returns a number."""
    prunes: bool


def begin(params: dict[str, Any]) -> State:
    return State(hash_of(params))


def hash_of(params: dict[str, Any]) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps(params, sort_keys=True).encode()).digest()[:8], "little")


def expected(params: dict[str, Any], seed: int, shape: Shape) -> tuple[float, int]:
    """Return a trial's value and weights in a run without faults."""
    state = begin(params)
    best: tuple[float, int] | None = None
    for _ in range(shape.epochs):
        for _ in range(shape.batches):
            state.train(seed)
        loss = state.end_epoch()["loss"]
        if best is None or loss < best[0]:
            best = loss, state.number
    assert best is not None
    return best if shape.keep == "best" else (state.history[-1]["loss"], state.number)


class Units:
    """The units of one worker, by the names of the real functions."""

    def __init__(self, shape: Shape, chance: Random, spilled: dict[str, Files]) -> None:
        self._shape = shape
        self._chance = chance
        self._spilled = spilled
        self.resident: dict[str, Resident] = {}

    def find(self, module: str, name: str) -> Callable[..., Work]:
        prefix = "shard_" if ".shard." in module else ""
        found: Callable[..., Work] = getattr(self, prefix + name)
        return found

    # Builds

    def check_build(self, _source: str) -> Work:
        return None
        yield

    def build_here(self, _source: str, info: TrialInfo) -> Work:
        params = {}
        for name, distribution in SPACE.items():
            params[name] = yield "suggest", (name, distribution), True
        state = begin(params)
        if self._shape.objective:
            return Built(values=((yield from self._objective(state, info)),))
        self.resident[info.attempt] = Resident(state, info.seed)
        shape = self._shape
        return Built(blueprint=Blueprint(shape.epochs, shape.batches, 10 * shape.batches, 1, 4, ("loss",), shape.keep))

    def _objective(self, state: State, info: TrialInfo) -> Generator[tuple[str, tuple[Any, ...], bool], Any, float]:
        for epoch in range(self._shape.epochs):
            for _ in range(self._shape.batches):
                state.train(info.seed)
            loss = state.end_epoch()["loss"]
            yield "report", (loss, epoch), False
            if (yield "should_prune", (), True):
                raise Pruned
        losses = [metrics["loss"] for metrics in state.history]
        return min(losses) if self._shape.keep == "best" else losses[-1]

    def build_and_hold(self, source: str, info: TrialInfo) -> Work:
        return self.build_here(source, info)

    def build_for_device(self, source: str, info: TrialInfo) -> Work:
        built = yield from self.build_here(source, info)
        if built.blueprint is None:
            return built
        parcel = json.dumps(self.resident[info.attempt].state.number).encode()
        return Built(blueprint=built.blueprint, parcel=parcel)

    # Strategy `whole`

    def load(self, attempt: str, seed: int, parcel: bytes | None, checkpoints: Path) -> Work:
        fresh = self.resident[attempt].state if parcel is None else State(json.loads(parcel))
        state = newest(checkpoints) or fresh
        self.resident[attempt] = Resident(state, seed)
        return Loaded(list(state.history), ())
        yield

    def train_slice(self, attempt: str, _seconds: float) -> Work:
        return self._train(self.resident[attempt])
        yield

    def end_epoch(self, attempt: str) -> Work:
        return self.resident[attempt].state.end_epoch()
        yield

    def keep_weights(self, attempt: str) -> Work:
        state = self.resident[attempt].state
        state.kept = state.number
        return None
        yield

    def checkpoint(self, attempt: str, directory: Path) -> Work:
        return write_checkpoint(directory, self.resident[attempt].state, self._shape)
        yield

    def save(self, attempt: str, path: Path) -> Work:
        write_weights(path, self.resident[attempt].state)
        return None
        yield

    def _train(self, held: Resident) -> Progress:
        state, batches = held.state, self._shape.batches
        count = min(self._chance.randint(1, batches), batches - state.batch)
        for _ in range(count):
            state.train(held.seed)
        return Progress(state.epoch, state.batch, batches, 0, 0.5, count, 0.1 * count)

    # Strategy `shard`, in the builder

    def shard_cut(
        self, attempt: str, number: int, seed: int, _budget: int, checkpoints: Path, _profiles: Path
    ) -> Work:  # fmt: skip
        held = self.resident[attempt]
        state = newest(checkpoints) or held.state
        name = f"trial-{number}-{attempt}"
        for earlier in [each for each in self._spilled if each.startswith(f"trial-{number}-")]:
            del self._spilled[earlier]
        held.files = self._spilled[name] = Files(state.copy())
        held.seed = seed
        return ShardCut(2, list(state.history), name=name, kit=str(seed))
        yield

    def shard_checkpoint(self, attempt: str, directory: Path) -> Work:
        files = self.resident[attempt].files
        assert files is not None
        return write_checkpoint(directory, files.state, self._shape)
        yield

    def shard_save(self, attempt: str, path: Path) -> Work:
        files = self.resident[attempt].files
        assert files is not None
        write_weights(path, files.state)
        return None
        yield

    # Strategy `shard`, on a device

    def shard_train_slice(self, attempt: str, spilled: Spilled, _seconds: float) -> Work:
        held = self._take_up(attempt, spilled)
        progress = self._train(held)
        yield from ()
        return self._done(held, progress, commit=self._chance.random() < 0.5)

    def shard_commit(self, attempt: str, spilled: Spilled) -> Work:
        return self._done(self._take_up(attempt, spilled), None, commit=True)
        yield

    def shard_end_epoch(self, attempt: str, spilled: Spilled, epoch: int) -> Work:
        held = self._take_up(attempt, spilled)
        state = held.state
        if state.epoch > epoch:  # evaluated and committed, but the answer was lost
            return self._done(held, state.history[epoch], commit=False)
        while state.batch < self._shape.batches:
            state.train(held.seed)
        return self._done(held, state.end_epoch(), commit=True)
        yield

    def shard_keep_weights(self, attempt: str, spilled: Spilled) -> Work:
        held = self._take_up(attempt, spilled)
        held.state.kept = held.state.number
        return self._done(held, None, commit=True)
        yield

    def _take_up(self, attempt: str, spilled: Spilled) -> Resident:
        held, files = self.resident.get(attempt), self._spilled[spilled.name]
        if held is None or held.commits != spilled.commits:
            held = self.resident[attempt] = Resident(files.state.copy(), int(spilled.kit), files, files.commits)
        return held

    def _done(self, held: Resident, value: Any, *, commit: bool) -> SliceDone:
        files = held.files
        assert files is not None
        if commit:
            files.state, files.commits = held.state.copy(), files.commits + 1
            held.commits = files.commits
        return SliceDone(value, held.commits, files.state == held.state, 0, 0)


class Pruned(Exception):
    """The objective has ended its trial."""


def newest(checkpoints: Path) -> State | None:
    """Read the newest checkpoint."""
    steps = CheckpointFiles(checkpoints).steps()
    if not steps:
        return None
    return State(**json.loads((checkpoints / f"step-{steps[-1]}.json").read_text()))


def write_checkpoint(directory: Path, state: State, shape: Shape) -> SavedCheckpoint:
    step = state.epoch * shape.batches + state.batch
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"step-{step}.json").write_text(json.dumps(vars(state)))
    return SavedCheckpoint(step, 1, 0.01)


def write_weights(path: Path, state: State) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(state.number if state.kept is None else state.kept))
