"""A Candidate refuses wrong fields when it is made, naming the field and the fix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hydra_tune as ht
from tests.candidates import rows, small_candidate

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize(
    ("field", "value", "fix"),
    [
        ("model", "resnet50", "torch.nn.Module"),
        ("loss", 0.5, "function(outputs, targets)"),
        ("optimizer", "adam", "partial(torch.optim.AdamW, lr=1e-3)"),
        ("optimizer", torch.optim.SGD(nn.Linear(1, 1).parameters()), "function of the parameters"),
        ("train", None, "dataset"),
        ("train", 3, "__len__"),
        ("valid", "rows.csv", "__len__"),
        ("batch_size", 0, "at least 1"),
        ("batch_size", 2.5, "whole number"),
        ("epochs", True, "whole number"),
        ("epochs", -1, "at least 1"),
        ("accumulate", 0, "at least 1"),
        ("clip_grad_norm", -1.0, "positive"),
        ("clip_grad_norm", float("nan"), "positive"),
        ("metrics", ["accuracy"], "dict"),
        ("metrics", {"loss": lambda o, t: 0}, "other than 'loss'"),
        ("metrics", {"accuracy": 0.9}, "function(outputs, targets)"),
        ("schedule_every", "batch", "'epoch' or 'step'"),
        ("keep", "all", "'last' or 'best'"),
        ("scheduler", 5, "LRScheduler"),
        ("collate", "pad", "list of samples"),
        ("split_points", ["layer9"], "named_modules"),
        ("split_points", "0", "list"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_the_fix(field: str, value: Any, fix: str) -> None:
    with pytest.raises(ht.CandidateError) as caught:
        small_candidate(**{field: value})
    message = str(caught.value)
    assert f"Candidate.{field}" in message
    assert fix in message
    assert "\n" not in message


def test_fields_are_keywords() -> None:
    with pytest.raises(TypeError):
        ht.Candidate(nn.Linear(1, 1))  # type: ignore[call-arg,misc]


def test_functions_may_stand_for_data() -> None:
    assert callable(small_candidate(train=rows).train)
