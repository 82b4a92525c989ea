"""Searches that choose a strategy for each trial: sensible choices, exact results, moves in the middle of training."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import hydra_tune as ht
from hydra_tune.planner import planner as planning
from hydra_tune.planner.choice import Choice
from hydra_tune.planner.planner import Planner
from hydra_tune.strategies.estimate import Estimate
from tests.fault.searches import run
from tests.strategies.searches import equals_the_plain_loop, events, rows
from tests.strategies.shard.test_search import wide

OPTIONS: dict[str, Any] = {"devices": "2xcpu", "seed": 11, "progress": False, "sampler": "random"}


def layered(**fields: Any) -> ht.Candidate:
    """Four equal layers without dropout or batch-norm: exact in micro-batches too."""
    layers: list[nn.Module] = [nn.Linear(32, 96)]
    for _ in range(4):
        layers += [nn.Tanh(), nn.Linear(96, 96)]
    given: dict[str, Any] = {
        "model": nn.Sequential(*layers, nn.Linear(96, 2)).double(), "loss": F.cross_entropy,
        "optimizer": partial(torch.optim.AdamW, lr=0.01), "train": rows(48), "valid": rows(16), "batch_size": 8,
        "epochs": 3,
    }  # fmt: skip
    return ht.Candidate(**(given | fields))


def build_by_size(trial: Any) -> ht.Candidate:
    """Large ones do not fit a MiB, small ones do."""
    if trial.suggest_categorical("size", ["small", "large"]) == "large":
        return wide()
    return wide(model=nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2)).double())


def test_what_fits_is_trained_whole_and_what_does_not_in_shards() -> None:
    sizes = [{"size": size} for size in ("small", "large", "small")]
    result = ht.search(build_by_size, trials=3, device_memory="1MiB", study="mixed", enqueue=sizes, **OPTIONS)
    assert [trial.strategy for trial in result.trials] == ["whole", "shard", "whole"]
    for trial in result.trials:
        assert 0 < (trial.peak_device_bytes or 0) <= 2**20
        choice = (trial.plan or {})["choice"]
        assert choice["strategy"] == trial.strategy
        assert choice["measured_batch_ms"] > 0
        assert {option["strategy"] for option in choice["options"]} == {"whole", "shard", "pipeline", "pack"}
    large = (result.trials[1].plan or {})["choice"]
    assert "on a device of 1.0 MiB" in large["because"]
    shown = run("show", "mixed", "1", folder=Path.cwd()).stdout
    assert "shards take turns" in shown
    assert "a batch took" in shown
    expected = [{"size": "large"}]
    same = ht.search(
        build_by_size, trials=1, device_memory="1MiB", study="again", enqueue=expected, strategy="shard", **OPTIONS
    )
    assert same.trials[0].seed is not None
    equals_the_plain_loop(same, lambda _: wide())


def test_a_candidate_that_no_strategy_can_train_is_refused_before_training() -> None:
    def build(trial: Any) -> ht.Candidate:
        return wide(model=nn.Sequential(nn.Linear(32, 2000), nn.Linear(2000, 2)).double())

    with pytest.raises(ht.SearchFailed):
        ht.search(build, trials=1, device_memory="1MiB", study="s", **OPTIONS)
    (record,) = ht.SearchResult("sqlite:///hydra_tune.db", "s").trials
    assert record.state == "OUT_OF_MEMORY"
    assert "the smallest device_memory for it is" in (record.error or "")
    units = json.loads(run("show", "s", "0", "--json", folder=Path.cwd()).stdout)["units"]
    assert not [unit for unit in units if unit["kind"] in ("train", "forward", "backward")]


def forced(name: str) -> Any:
    """A planner's reconsideration that moves each trial once, to that strategy."""
    moved: list[str] = []

    def reconsider(
        _self: Planner, estimates: list[Estimate], current: str, epochs: float, times: float
    ) -> Choice | None:
        if moved or current == name:
            return None
        moved.append(current)
        found = next(estimate for estimate in estimates if estimate.strategy == name)
        assert not found.refused, found.refused
        return Choice(found, "the test says so", tuple(estimates), epochs)

    return reconsider


@pytest.mark.parametrize(("first", "then"), [("whole", "pipeline"), ("shard", "pipeline"), ("whole", "shard")])
def test_a_move_in_the_middle_of_training_changes_nothing(
    first: str, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last survivor goes on over all devices, from a checkpoint, to the weights of a plain loop."""
    monkeypatch.setattr(planning, "SOON_DONE", 0.0)
    monkeypatch.setattr(Planner, "reconsider", forced(then))
    plain = Planner.choose

    def begin(self: Planner, estimates: list[Estimate], epochs: float) -> Choice | None:
        return plain(self, [e for e in estimates if e.strategy == first], epochs)

    monkeypatch.setattr(Planner, "choose", begin)
    result = ht.search(
        lambda _trial: layered(), trials=1, strategy=["whole", "shard", "pipeline"], study="moves", **OPTIONS
    )
    equals_the_plain_loop(result, lambda _: layered())
    (record,) = result.trials
    assert record.strategy == then
    choice = (record.plan or {})["choice"]
    assert [earlier["strategy"] for earlier in choice["earlier"]] == [first]
    assert ("strategy", f"goes on by {then}: the test says so") in events(Path.cwd())
    assert list(result.study.trials[0].intermediate_values) == [0, 1, 2]


def test_a_trial_that_does_not_fit_after_all_goes_on_in_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice was wrong about the memory: the trial runs out of it, and is cut."""

    def wrong(_self: Planner, estimates: list[Estimate], epochs: float) -> Choice | None:
        there = {estimate.strategy for estimate in estimates}
        name = "whole" if "whole" in there else "shard"
        return Choice(Estimate(strategy=name, seconds=1.0, work=1.0, batch_seconds=0.1), "wrong", (), epochs)

    monkeypatch.setattr(Planner, "choose", wrong)
    result = ht.search(lambda _trial: wide(), trials=1, device_memory="1MiB", study="s", **OPTIONS)
    equals_the_plain_loop(result, lambda _: wide())
    (record,) = result.trials
    assert record.strategy == "shard"
    assert "ran out of memory" in (record.plan or {})["choice"]["because"]


def test_the_sampler_can_choose_the_strategy() -> None:
    def build(trial: Any) -> ht.Candidate:
        trial.suggest_float("lr", 0.1, 1.0)
        return layered(epochs=1)

    result = ht.search(build, trials=4, strategy="search", study="s", **OPTIONS)
    for trial in result.trials:
        chosen = trial.params["strategy"]
        assert trial.strategy == chosen or (
            chosen == "auto" and trial.strategy in ("whole", "shard", "pipeline", "pack")
        )


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        ([], "empty list"),
        (["whole", "whole"], "named twice"),
        ("whole,shards", "did you mean 'shard'"),
        ({"name": "auto", "x": 1}, "has no option 'x'"),
        (["whole", {"name": "pipeline", "placer": "x"}], "placer cannot be 'x'"),
    ],
)
def test_wrong_choices_get_one_line(strategy: Any, says: str) -> None:
    with pytest.raises(ht.HydraTuneError, match=says):
        ht.search(lambda _trial: layered(), trials=1, strategy=strategy, **OPTIONS)


def test_what_cannot_be_tried_out_is_trained_whole() -> None:
    """A loss that is stateful in ways that cannot be copied: training says what there is to say."""

    class Odd:
        def __reduce__(self) -> Any:
            raise TypeError("one of a kind")

        def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(outputs, targets)

    result = ht.search(lambda _trial: layered(loss=Odd(), epochs=1), trials=1, study="s", **OPTIONS)
    assert result.trials[0].strategy == "whole"
    assert "one of a kind" in (result.trials[0].plan or {})["choice"]["because"]


def test_pipelines_that_take_most_of_the_devices_follow_each_other() -> None:
    """Each gets the memory that it was planned with, however many trials are in flight."""
    options = OPTIONS | {"device_memory": "1MiB", "strategy": ["whole", "pipeline"]}
    result = ht.search(lambda _trial: layered(epochs=1), trials=3, study="s", **options)
    assert [trial.strategy for trial in result.trials] == ["pipeline"] * 3
    assert all(trial.state == "COMPLETE" for trial in result.trials)


def test_no_trial_moves_between_strategies_of_unlike_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()

    def reconsider(_self: Planner, estimates: list[Estimate], *_rest: Any) -> Choice | None:
        seen.update(estimate.strategy for estimate in estimates)
        return None

    monkeypatch.setattr(planning, "SOON_DONE", 0.0)
    monkeypatch.setattr(Planner, "reconsider", reconsider)
    ht.search(lambda _trial: layered(), trials=1, strategy=["whole", "shard", "sparse"], study="s", **OPTIONS)
    assert seen == {"whole", "shard"}


def test_a_parameter_of_that_name_is_one_clear_failure() -> None:
    def build(trial: Any) -> ht.Candidate:
        trial.suggest_categorical("strategy", ["mine", "yours"])
        return layered(epochs=1)

    with pytest.raises(ht.SearchFailed, match="another name"):
        ht.search(build, trials=1, strategy="search", study="s", **OPTIONS)


def test_objectives_are_asked_for_one_by_one_on_one_device() -> None:
    options = OPTIONS | {"devices": "1xcpu"}
    result = ht.search(lambda trial: trial.suggest_float("x", 0, 1), trials=3, study="s", **options)
    first, second, _ = result.study.trials
    assert first.datetime_complete is not None
    assert second.datetime_start is not None
    assert second.datetime_start >= first.datetime_complete


class Drawing(Dataset[Any]):
    """Rows with noise of the data set's own, which no seed of ours resets."""

    def __init__(self) -> None:
        self.random = random.Random(3)

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return torch.full((32,), index / 32 + self.random.random(), dtype=torch.float64), index % 2


def build_drawing(trial: Any) -> ht.Candidate:
    return layered(train=Drawing(), valid=None, epochs=1)


def test_a_look_at_a_candidate_draws_nothing_from_its_data() -> None:
    """The first candidate is looked at where it is trained: the data is the same object."""
    results = [
        ht.search(build_drawing, trials=1, strategy=strategy, study=strategy, **OPTIONS | {"devices": "1xcpu"})
        for strategy in ("whole", "auto")
    ]
    assert results[0].best_value == results[1].best_value
    assert results[1].trials[0].strategy == "whole"


def build_parametrized(trial: Any) -> ht.Candidate:
    """Its model cannot be pickled."""
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 2))
    return wide(model=nn.Sequential(nn.Linear(32, 16), nn.ReLU(), layer).double())


def test_a_candidate_that_cannot_be_sent_is_trained_where_it_is_built() -> None:
    result = ht.search(build_parametrized, trials=2, device_memory="64MiB", **OPTIONS)
    assert [(trial.state, trial.strategy) for trial in result.trials] == [("COMPLETE", "whole")] * 2
    equals_the_plain_loop(result, build_parametrized)


def test_small_candidates_are_trained_by_a_choice_without_whole() -> None:
    result = ht.search(build_by_size, trials=1, strategy=["shard", "pipeline"], enqueue=[{"size": "small"}], **OPTIONS)
    assert result.trials[0].strategy == "shard"


def test_trials_of_one_shape_are_packed_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second trial of a shape on; times are not measured here, so the planner takes a pack where it may."""

    def choose(_self: Planner, estimates: Any, epochs: float) -> Choice | None:
        found = {each.strategy: each for each in estimates if not each.refused}
        return Choice(found.get("pack", found["whole"]), "as the test wants it", tuple(estimates), epochs)

    def build(trial: Any) -> ht.Candidate:
        rate = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
        return layered(optimizer=partial(torch.optim.SGD, lr=rate), epochs=6)

    monkeypatch.setattr(Planner, "choose", choose)
    packed = ht.search(build, trials=8, study="packed", **{**OPTIONS, "devices": "1xcpu"})
    assert packed.trials[0].strategy == "whole"
    together = [trial for trial in packed.trials if trial.strategy == "pack"]
    assert len(together) >= 5
    assert max((trial.plan or {})["members"] for trial in together) >= 2
    options = {option["strategy"]: option for option in (packed.trials[0].plan or {})["choice"]["options"]}
    assert "no other trial of its shape" in options["pack"]["refused"]
    whole = ht.search(build, trials=8, study="alone", strategy="whole", **OPTIONS)
    for mine, theirs in zip(packed.trials, whole.trials, strict=True):
        assert mine.value == pytest.approx(theirs.value, abs=1e-9)
