"""Micro-batches are refused where their losses are not the batch's, whether or not dropout is on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hydra_tune as ht
from hydra_tune.core.errors import CandidateError
from hydra_tune.strategies.pipeline.microbatches import microbatches_for
from tests.strategies.shard.models import Adam, start

IGNORED = -100


def ignoring(dropout: float) -> ht.Candidate:
    """A loss that divides by the number of labels that are not ignored, of which rows have different numbers."""
    torch.manual_seed(1)
    inputs, targets = torch.randn(8, 5, 4), torch.randint(0, 3, (8, 5))
    targets[0, 1:] = targets[5, 2:] = IGNORED
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Linear(8, 3))
    return ht.Candidate(
        model=model, loss=lambda out, labels: F.cross_entropy(out.flatten(0, 1), labels.flatten()), optimizer=Adam,
        train=TensorDataset(inputs, targets), batch_size=8, epochs=1,
    )  # fmt: skip


@pytest.mark.parametrize("dropout", [0.0, 1e-12, 0.5])
def test_a_loss_that_divides_by_a_count_is_refused(dropout: float) -> None:
    with pytest.raises(CandidateError, match=r"microbatches is 2, but 2 micro-batches, weighted by rows, have"):
        microbatches_for(start(ignoring(dropout)), 2, devices=2)
    assert microbatches_for(start(ignoring(dropout)), None, devices=2)[0] == 1
