"""The loop of one replica, without processes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hydra_tune as ht
from hydra_tune.strategies.sparse.pruning import Pruning
from hydra_tune.strategies.sparse.training import SparseTraining, parts_of
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


@pytest.mark.parametrize("rows", range(1, 9))
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_no_replica_gets_one_row_of_several_for_batch_norm(rows: int, replicas: int):
    parts = parts_of(rows, replicas, in_pairs=True)
    sizes = [stop - start for start, stop in parts]
    assert len(parts) == replicas
    assert sum(sizes) == rows
    assert 1 not in sizes or rows == 1
    assert all(start <= stop for start, stop in parts)
    assert max(size - min(filter(None, sizes)) for size in sizes) <= 1


def test_the_replicas_of_a_net_with_batch_norm_train_on_a_batch_of_three_rows():
    candidate = ht.Candidate(
        model=nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double(), loss=F.cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=0.01), train=rows(3), batch_size=3, epochs=1,
    )  # fmt: skip
    pruning = Pruning(sparsity=0.5, mask="magnitude", dense_epochs=0)
    training = SparseTraining(Prepared(candidate, rows(3), None), 3, torch.device("cpu"), pruning, 0, 2)
    assert training.normed
    training.weights.replicas = 1  # no process group here
    training._train_batch()
    assert training.loss_rows == 3
    training.weights.close()
