"""How detailed a survey is: a candidate that trains briefly is only rehearsed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hydra_tune.planner import survey as surveying
from hydra_tune.planner.question import Question, Survey
from hydra_tune.planner.survey import survey
from hydra_tune.strategies.pool import Pool, Rates
from hydra_tune.training.prepared import Prepared
from tests.planner.test_auto_search import layered

EXACT = ("whole", "shard", "pipeline")
SMALL = 600 * 2**10
"""Less than the candidate takes as a whole."""


def looked_at(folder: Path, memory: int, soon_done: float, among: tuple[str, ...] = EXACT) -> Survey:
    made = layered()
    context: Any = SimpleNamespace(
        resident={"a": Prepared(made, made.train, made.valid)},
        setup=SimpleNamespace(directory=str(folder / "run"), overflow=()),
    )
    (folder / "run").mkdir()
    pool = Pool(devices=2, memory=memory, host_bytes=2**30, disk_bytes=2**30)
    return survey(context, "a", 1, folder / "profiles", Question((pool,), among, soon_done))


def refusals(found: Survey) -> dict[str, str]:
    (estimates,) = found.estimates
    return {estimate.strategy: estimate.refused for estimate in estimates}


def test_what_fits_and_is_soon_done_is_only_rehearsed(tmp_path: Path) -> None:
    why = refusals(looked_at(tmp_path, 2**30, 1e9))
    assert not why["whole"]
    assert "fits a device" in why["shard"]
    assert "fits a device" in why["pipeline"]
    assert not list(tmp_path.glob("profiles/[0-9a-f]*.json")), "it was not cut open"


def test_what_is_soon_done_in_shards_is_not_laid_out_in_stages(tmp_path: Path) -> None:
    why = refusals(looked_at(tmp_path, SMALL, 1e9))
    assert "on a device of" in why["whole"]
    assert not why["shard"]
    assert why["pipeline"] == "not estimated: in shards it trains in a short time"


def test_what_takes_long_is_looked_into_in_every_way(tmp_path: Path) -> None:
    why = refusals(looked_at(tmp_path, 2**30, 0.0))
    assert not any(why.values())


def test_a_machine_without_room_to_measure_in_costs_no_strategy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_places: Path) -> Rates:
        raise OSError(27, "File too large")

    monkeypatch.setattr(surveying, "calibrate", full)
    assert not refusals(looked_at(tmp_path, SMALL, 0.0))["shard"]


@pytest.mark.parametrize("among", [("shard",), ("shard", "pipeline"), ("pipeline", "shard")])
def test_a_choice_without_whole_is_looked_into_however_small_the_candidate(
    tmp_path: Path, among: tuple[str, ...]
) -> None:
    why = refusals(looked_at(tmp_path, 2**30, 1e9, among))
    assert not why["shard"]
