"""Models of transformers in stages, in the forms in which users call them, with several micro-batches."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hydra_tune as ht
from hydra_tune.strategies.pipeline.strategy import Pipeline
from tests.strategies.pipeline.here import Here, train
from tests.zoo.test_zoo import IN_STAGES, Rows, _compare, built, plain_loop

LABELS_WITHIN = ("T5",)
"""Models that need their labels among the inputs, from which they make those of the decoder."""


def without_dropout(model: nn.Module) -> None:
    """Every dropout off, whether a module or a number that a forward hands on."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout))):
                setattr(module, name, 0.0)


def of_logits(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """A loss of the user's own, of what the model gives without labels."""
    return F.cross_entropy(outputs.logits.flatten(0, -2), targets.flatten())


def made(name: str, form: str) -> ht.Candidate:
    found = built(name)
    without_dropout(found.model)
    if form == "loss outside" and name not in LABELS_WITHIN:
        rows = [({k: v for k, v in row.items() if k != "labels"}, row["labels"]) for row, _ in found.train.rows]  # type: ignore[attr-defined]
        found = replace(found, train=Rows(rows), loss=of_logits)
    elif form == "loss outside":
        rows = [(row, row["labels"]) for row, _ in found.train.rows]  # type: ignore[attr-defined]
        found = replace(found, train=Rows(rows), loss=of_logits)
    return found


@pytest.mark.parametrize("form", ["labels", "loss outside"])
@pytest.mark.parametrize("name", IN_STAGES)
def test_several_microbatches_make_the_steps_of_whole_batches(name: str, form: str, tmp_path: Path) -> None:
    expected = plain_loop(made(name, form))
    run = Here(made(name, form), tmp_path, 2)
    trial = asyncio.run(train(run, Pipeline(microbatches=2, placer="balanced")))
    assert len({stage.device for stage in trial.staged.stages}) == 2
    assert trial.staged.microbatches == 2
    assert not run.notes
    _compare({key: t for key, t in run.state()["tensors"].items() if key in expected}, expected)


def test_a_model_whose_own_loss_divides_by_a_count_has_one_microbatch(tmp_path: Path) -> None:
    found = made("GPT-2", "labels")
    for i, (row, _) in enumerate(found.train.rows):  # type: ignore[attr-defined]
        row["labels"] = torch.where(torch.arange(len(row["labels"])) < i % 5, -100, row["labels"])
    run = Here(found, tmp_path, 2)
    trial = asyncio.run(train(run, Pipeline(placer="balanced")))
    assert trial.staged.microbatches == 1
    assert any("it is no mean over rows" in note for note in run.notes)
