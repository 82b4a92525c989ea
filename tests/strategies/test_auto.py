"""The strategy that chooses others, without processes: which ones it may choose for a trial that has a checkpoint."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hydra_tune.builds import Prepared
from hydra_tune.engine.unit import Failure, UnitFailed
from hydra_tune.planning import planner as planning
from hydra_tune.planning.choice import Choice
from hydra_tune.planning.estimates import Estimate
from hydra_tune.planning.planner import Planner
from hydra_tune.planning.pool import Pool, Rates
from hydra_tune.planning.rates import keep_rates
from hydra_tune.planning.survey import Survey
from hydra_tune.strategies.auto import NO_MEMORY, Auto, DoesNotFit, _Planned
from hydra_tune.strategies.elastic import Elastic
from hydra_tune.strategies.planned_run import PlannedRun
from hydra_tune.strategies.sparse import Sparse
from hydra_tune.strategies.whole import Whole
from tests.pipeline.here import BUILDER, ROOM, Here
from tests.strategies.test_auto_search import forced, layered

TOO_MUCH = 2**60
"""Bytes that no host has."""


class PlannedHere(Here, PlannedRun):
    """An attempt in this process, in a search that plans; the host has room for ordinary trials."""

    def __init__(self, folder: Path, before: str = "") -> None:
        super().__init__(layered(), folder, devices=2)
        self.blueprint.whole_because = ""  # type: ignore[misc]
        self.planner = Planner(Pool(devices=2, memory=ROOM, host_bytes=ROOM), rivals=lambda: 1)
        self.before = before
        self.went_by: list[str] = []
        self.epochs_behind: list[int] = []
        """How far it was each time that a strategy took it up."""

    async def bring(self, *, apart: bool, anew: bool) -> None:
        if anew:
            made = layered()
            self.contexts[BUILDER].resident["a"] = Prepared(made, made.train, made.valid)

    async def admit(self, choice: Choice) -> None:
        if choice.estimate.host_bytes >= TOO_MUCH:
            raise DoesNotFit("the host has less")

    async def restored(self, history: list[dict[str, float]], notes: tuple[str, ...]) -> None:
        self.epochs_behind.append(len(history))

    def strategy_before(self) -> str:
        return self.before

    def chosen(self, choice: Choice) -> None:
        self.went_by.append(choice.strategy)
        assert choice.strategy != "sparse" or not self.before, f"into sparse, after {self.before}"
        self.before = choice.strategy

    async def suggest(self, *_: Any) -> str:
        raise AssertionError("the sampler has no say here")

    def surveyed(self, found: Survey) -> None: ...
    def took(self, batch_seconds: float) -> None: ...


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
    asyncio.run(Auto(among=(Whole(), Sparse(), Elastic())).train(run))
    assert offered == [{"whole", "sparse", "elastic"}, {"whole"}]
    assert run.went_by == ["whole", "elastic", "whole"]
    assert run.epochs_behind == [0, 1], "it went on from the checkpoint"


def test_no_attempt_enters_sparse_from_the_checkpoint_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = preferred(monkeypatch, "sparse")
    run = PlannedHere(tmp_path, before="whole")
    asyncio.run(Auto(among=(Whole(), Sparse())).train(run))
    assert offered == [{"whole"}]
    assert run.went_by == ["whole"]


@pytest.mark.parametrize("batches", [0, 3])
def test_what_sparse_has_trained_before_it_ran_out_of_memory_is_for_nobody_else(tmp_path: Path, batches: int) -> None:
    """Its checkpoints are of their own kind: another strategy would find them unusable, and start over for ever."""
    run, auto = PlannedHere(tmp_path), Auto(among=(Whole(), Sparse()))
    assert run.planner is not None
    options = (Estimate(strategy="whole", seconds=1.0), Estimate(strategy="sparse", seconds=0.5))
    planned = _Planned(run, auto, run.planner, auto.names, options, batches=batches)
    error = UnitFailed(Failure("OutOfMemoryError", "no room", "", NO_MEMORY))
    choice = Choice(options[1], "", options, epochs=2)
    if batches:
        with pytest.raises(UnitFailed):
            planned._instead(choice, error)
    else:
        assert planned._instead(choice, error).strategy == "whole"
