"""The loop of one replica, without processes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hydra_tune as ht
from hydra_tune.strategies.sparse.pruning import Pruning
from hydra_tune.strategies.sparse.training import SparseTraining
from hydra_tune.training.prepared import Prepared
from tests.candidates import rows

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("rewind", [False, True])
def test_weights_that_are_kept_are_those_that_were_judged(rewind: bool):
    candidate = ht.Candidate(
        model=nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double(), loss=F.cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=0.01), train=rows(30), valid=rows(10), batch_size=10, epochs=3,
        keep="best",
    )  # fmt: skip
    pruning = Pruning(sparsity=0.8, mask="early-bird", dense_epochs=1, rewind=rewind)
    training = SparseTraining(Prepared(candidate, rows(30), rows(10)), 3, torch.device("cpu"), pruning, 0, 1)
    training.train_batches(3)
    judged = {name: tensor.detach().clone() for name, tensor in training.named_tensors().items()}
    training.end_epoch()
    training.keep_weights()
    assert training.kept is not None
    assert all(torch.equal(tensor, judged[name]) for name, tensor in training.kept.items())
    training.look_for_mask()
    assert training.account().phase == "sparse"
