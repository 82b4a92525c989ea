"""A few batches of a candidate's own training on a copy: what a batch takes, in seconds and in bytes, if trained whole.

Nothing of it stays: it is a copy that trains, and training seeds its random numbers when it starts.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch

from hydra_tune.batches import move
from hydra_tune.builds import Prepared
from hydra_tune.engine.clock import work_seconds
from hydra_tune.planning.copies import copied_candidate, copied_data
from hydra_tune.training import MEASURED_STEPS, Training

TIMED_SECONDS = 0.3
"""How long batches are timed, at least one and at most so many:"""
TIMED_STEPS = 12


@dataclass(frozen=True)
class Rehearsal:
    """What training a whole candidate takes on one device that has nothing else to do."""

    batch_seconds: float
    """A training batch, its data included."""
    judge_seconds: float
    """A batch of the validation data."""
    peak_bytes: int
    state_bytes: int
    """What stays between batches: parameters, buffers, optimizer state."""


def rehearse(prepared: Prepared, seed: int, device: torch.device) -> Rehearsal:
    """Train some batches of a copy. Raises whatever user code raises, and CannotBeCopied."""
    train, valid = copied_data(prepared.train), copied_data(prepared.valid)
    training = Training(copied_candidate(prepared.candidate), train, valid, seed, device)
    try:
        for _ in range(MEASURED_STEPS):  # a step each, or where an epoch is short, what there is
            _some_steps(training, 1)
        return Rehearsal(
            _batch_seconds(training), _judge_seconds(training), training.peak_bytes, training.resident_bytes
        )
    finally:
        # A loss that looks into the model by itself has left gradients in the original.
        prepared.candidate.model.zero_grad(set_to_none=True)


def _some_steps(training: Training, count: int) -> int:
    """Train for so many optimizer steps, from the first batch again where the epoch has ended; returns the batches."""
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
