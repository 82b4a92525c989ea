"""Searches with strategy `pack`: results of plain loops, shared turns, pruning, lost workers, refusals."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hydra_tune as ht
from hydra_tune.core.errors import SpecError
from tests.candidates import small_candidate
from tests.fault.searches import run

OPTIONS: dict[str, Any] = {"seed": 5, "sampler": "random", "progress": False, "devices": "1xcpu"}


def build(trial: Any) -> ht.Candidate:
    """Eight trials of one shape and different numbers; one rate is hopeless."""
    dropout = nn.Dropout(trial.suggest_float("dropout", 0, 0.6))
    model = nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), dropout, nn.Linear(16, 3))
    momentum = trial.suggest_float("momentum", 0.1, 0.9)
    rate = trial.suggest_float("lr", 0.01, 0.5)
    return small_candidate(
        model=model.double(), optimizer=partial(torch.optim.SGD, lr=rate, momentum=momentum),
        epochs=6, keep="best",
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=trial.suggest_int("every", 1, 3), gamma=0.7),
    )  # fmt: skip


def search(strategy: Any, study: str, trials: int = 8, **options: Any) -> ht.Result:
    return ht.search(build, trials=trials, strategy=strategy, study=study, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ht.Result, ht.Result]:
    """The same trials in packs and whole, with a pruner that sees the same reports."""
    folder = tmp_path_factory.mktemp("packed")
    storage = f"sqlite:///{folder}/hydra_tune.db"
    return folder, search("pack", "packed", storage=storage), search("whole", "whole", storage=storage)


def test_packed_trials_end_as_whole_ones(packed: tuple[Path, ht.Result, ht.Result]) -> None:
    _folder, pack, whole = packed
    assert [trial.strategy for trial in pack.trials] == ["pack"] * 8
    for mine, theirs in zip(pack.trials, whole.trials, strict=True):
        assert mine.params == theirs.params
        assert mine.value == pytest.approx(theirs.value, abs=1e-9)
        weights = whole.model(theirs.number).state_dict()
        for name, tensor in pack.model(mine.number).state_dict().items():
            torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-9)


def test_trials_are_trained_as_one_and_it_is_shown(packed: tuple[Path, ht.Result, ht.Result]) -> None:
    folder, pack, _whole = packed
    plans = [trial.plan or {} for trial in pack.trials]
    assert max(plan["members"] for plan in plans) >= 4
    assert all(plan["with"] for plan in plans)
    shown = run("show", "packed", "3", folder=folder).stdout
    assert "trained as one of up to" in shown
    assert "other trials:" in shown


def test_pruned_trials_leave_and_others_take_their_seats(tmp_path: Path) -> None:
    """With at most three members, ten trials take turns, and what remains equals whole trials."""
    pruner = {"name": "median", "n_startup_trials": 2, "n_warmup_steps": 1}
    storage = f"sqlite:///{tmp_path}/hydra_tune.db"
    found = search({"name": "pack", "size": 3}, "pruned", trials=10, pruner=pruner, storage=storage)
    states = [trial.state for trial in found.trials]
    assert "PRUNED" in states
    assert max((trial.plan or {})["members"] for trial in found.trials) <= 3
    whole = search("whole", "whole", trials=10, storage=storage)
    for mine, theirs in zip(found.trials, whole.trials, strict=True):
        if mine.state == "COMPLETE":
            assert mine.value == pytest.approx(theirs.value, abs=1e-9)


def test_one_that_diverges_or_raises_fails_alone(tmp_path: Path) -> None:
    def some_fail(trial: Any) -> ht.Candidate:
        def metric(outputs: torch.Tensor, targets: torch.Tensor) -> float:
            if trial.number == 2:
                raise ZeroDivisionError("no")
            return 0.0

        model = nn.Linear(6, 3).double()
        if trial.number == 1:
            nn.init.constant_(model.weight, float("inf"))
        return small_candidate(model=model, epochs=2, metrics={"odd": metric})

    found = ht.search(
        some_fail, trials=5, strategy="pack", study="failing", storage=f"sqlite:///{tmp_path}/hydra_tune.db", **OPTIONS
    )
    states = {trial.number: trial.state for trial in found.trials}
    assert states == {0: "COMPLETE", 1: "DIVERGED", 2: "FAILED", 3: "COMPLETE", 4: "COMPLETE"}
    assert "no" in found.trials[2].error


def test_what_cannot_be_packed_trains_alone_and_says_why(tmp_path: Path) -> None:
    def odd(trial: Any) -> ht.Candidate:
        return small_candidate(optimizer=torch.optim.Adagrad, epochs=1)

    storage = f"sqlite:///{tmp_path}/hydra_tune.db"
    found = ht.search(odd, trials=2, strategy="pack", study="odd", storage=storage, **OPTIONS)
    assert all("Adagrad has no batched form" in (trial.plan or {})["alone_because"] for trial in found.trials)
    assert "trained alone: optimizer Adagrad" in run("show", "odd", "0", folder=tmp_path).stdout


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "many"])
def test_a_wrong_size_is_refused(size: Any) -> None:
    with pytest.raises(SpecError, match="option size of strategy 'pack' cannot be"):
        search({"name": "pack", "size": size}, "none")
