"""The strategy `auto` without processes: which strategies it may choose for a trial that has a checkpoint."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hydra_tune.engine.unit import Failure, UnitFailed
from hydra_tune.planner import planner as planning
from hydra_tune.planner.admission import Admission, Room
from hydra_tune.planner.auto import NO_MEMORY, STRATEGY_NOTE, Auto, _Planned
from hydra_tune.planner.choice import Choice
from hydra_tune.planner.planner import Planner
from hydra_tune.planner.rates import keep_rates
from hydra_tune.strategies.elastic.strategy import Elastic
from hydra_tune.strategies.estimate import Estimate
from hydra_tune.strategies.pool import Pool, Rates
from hydra_tune.strategies.sparse.strategy import Sparse
from hydra_tune.strategies.whole.strategy import Whole
from hydra_tune.training.prepared import Prepared
from tests.planner.test_auto_search import forced, layered
from tests.strategies.pipeline.here import BUILDER, ROOM, Here

TOO_MUCH = 2**60
"""Bytes that no host has."""


class PlannedHere(Here):
    """An attempt in this process, in a search that plans; the host has room for ordinary trials."""

    def __init__(self, folder: Path, before: str = "") -> None:
        super().__init__(layered(), folder, devices=2)
        self.blueprint.whole_because = ""  # type: ignore[misc]
        self.before = before
        if before:
            self.checkpoints.mkdir()
            (self.checkpoints / STRATEGY_NOTE).write_text(before)
            (self.checkpoints / "some.safetensors").touch()
        self.went_by: list[str] = []
        self.epochs_behind: list[int] = []
        """How far it was each time that a strategy took it up."""

    async def bring(self, *, apart: bool, anew: bool) -> None:
        if anew:
            made = layered()
            self.contexts[BUILDER].resident["a"] = Prepared(made, made.train, made.valid)

    async def restored(self, history: list[dict[str, float]], notes: tuple[str, ...]) -> None:
        self.epochs_behind.append(len(history))

    def chosen(self, strategy: str, choice: dict[str, Any]) -> None:
        self.went_by.append(strategy)
        assert strategy != "sparse" or not self.before, f"into sparse, after {self.before}"
        self.before = strategy


def planner() -> Planner:
    room = Room(host=2**50, disk=0, on_devices=2**50)
    return Planner(Pool(devices=2, memory=ROOM, host_bytes=ROOM), lambda: 1, Admission(room, print))


def preferred(monkeypatch: pytest.MonkeyPatch, *names: str) -> list[set[str]]:
    """One choice after another is of these strategies, where it can be; returns what each could choose from."""
    plain, wanted, offered = Planner.choose, iter(names), list[set[str]]()

    def choose(self: Planner, estimates: list[Estimate], epochs: float) -> Choice | None:
        offered.append({estimate.strategy for estimate in estimates if not estimate.refused})
        name = next(wanted)
        return plain(self, [each for each in estimates if each.strategy == name] or estimates, epochs)

    monkeypatch.setattr(Planner, "choose", choose)
    monkeypatch.setattr(planning, "SOON_DONE", 0.0)  # so that more than whole is looked into
    keep_rates(Rates())  # nothing here depends on the machine's
    return offered


def test_no_trial_enters_sparse_when_the_strategy_that_it_moved_to_finds_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one has not trained a batch, but there is the checkpoint of the one before it."""
    offered, moves = preferred(monkeypatch, "whole", "sparse"), forced("elastic")

    def reconsider(*given: Any) -> Choice | None:
        found: Choice | None = moves(*given)
        return found and replace(found, estimate=replace(found.estimate, host_bytes=TOO_MUCH))

    monkeypatch.setattr(Planner, "reconsider", reconsider)
    run = PlannedHere(tmp_path)
    asyncio.run(Auto(among=(Whole(), Sparse(), Elastic()), planner=planner()).train(run))
    assert offered == [{"whole", "sparse", "elastic"}, {"whole"}]
    assert run.went_by == ["whole", "elastic", "whole"]
    assert run.epochs_behind == [0, 1], "it went on from the checkpoint"


def test_no_attempt_enters_sparse_from_the_checkpoint_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = preferred(monkeypatch, "sparse")
    run = PlannedHere(tmp_path, before="whole")
    asyncio.run(Auto(among=(Whole(), Sparse()), planner=planner()).train(run))
    assert offered == [{"whole"}]
    assert run.went_by == ["whole"]


@pytest.mark.parametrize("batches", [0, 3])
def test_what_sparse_has_trained_before_it_ran_out_of_memory_is_for_nobody_else(tmp_path: Path, batches: int) -> None:
    """Its checkpoints are of their own kind: another strategy would find them unusable, and start over for ever."""
    run, auto = PlannedHere(tmp_path), Auto(among=(Whole(), Sparse()))
    options = (Estimate(strategy="whole", seconds=1.0), Estimate(strategy="sparse", seconds=0.5))
    planned = _Planned(run, auto, planner(), auto.names, options, batches=batches)
    error = UnitFailed(Failure("OutOfMemoryError", "no room", "", NO_MEMORY))
    choice = Choice(options[1], "", options, epochs=2)
    if batches:
        with pytest.raises(UnitFailed):
            planned._instead(choice, error)
    else:
        assert planned._instead(choice, error).strategy == "whole"
