"""Rehearsal: trains a few batches on a copy of a candidate to measure a batch's seconds and bytes if trained whole.

It leaves no trace: only the copy is trained, and training seeds its random numbers when it starts.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from hydra_tune.core.clock import work_seconds
from hydra_tune.core.trees import move
from hydra_tune.planner.candidate_copies import copied_candidate, copied_data
from hydra_tune.strategies.estimate import Rehearsal
from hydra_tune.training.loop import MEASURED_STEPS, Training
from hydra_tune.training.prepared import Prepared

TIMED_SECONDS = 0.3
"""Seconds for which batches are timed: at least one batch, at most `TIMED_STEPS`."""
TIMED_STEPS = 12


def rehearse(prepared: Prepared, seed: int, device: torch.device) -> Rehearsal:
    """Train some batches of a copy. Raises any error of user code, and CannotBeCopied."""
    train, valid = copied_data(prepared.train), copied_data(prepared.valid)
    training = Training(copied_candidate(prepared.candidate), train, valid, seed, device)
    try:
        for _ in range(MEASURED_STEPS):  # one step each, or the rest of a short epoch
            _some_steps(training, 1)
        return Rehearsal(
            _batch_seconds(training), _judge_seconds(training), training.peak_bytes, training.resident_bytes
        )
    finally:
        # A loss that accesses the model by itself has left gradients in the original.
        prepared.candidate.model.zero_grad(set_to_none=True)


def _some_steps(training: Training, count: int) -> int:
    """Train `count` optimizer steps, restarting an ended epoch at its first batch; return the number of batches."""
    if training.batch >= len(training.batches):
        training.batch = 0
    return training.train_steps(count).batches_done


def _batch_seconds(training: Training) -> float:
    found: list[float] = []
    total = 0.0
    while not found or (total < TIMED_SECONDS and len(found) < TIMED_STEPS):
        began = work_seconds(training.device)
        batches = _some_steps(training, 1 if total else 2)
        seconds = work_seconds(training.device) - began
        found.append(seconds / batches)
        total += seconds
    return statistics.median(found)


@torch.no_grad()
def _judge_seconds(training: Training) -> float:
    if training.valid is None:
        return 0.0
    training.model.eval()
    found = []
    for _ in range(2):  # the first one may have to warm up
        began = work_seconds(training.device)
        batch: Any = move(training.valid.fetch(0, 0), training.device)
        training.judge_batch(*batch)
        found.append(work_seconds(training.device) - began)
    return min(found)
