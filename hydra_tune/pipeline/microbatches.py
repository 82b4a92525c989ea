"""Cutting a batch into micro-batches, and whether their steps are those of the whole batch.

Each micro-batch counts by its rows. For a loss that is a mean over rows the weighted sum is the batch's loss, and its
gradient the batch's gradient. Dropout draws other numbers for other batches, batch-norm takes the mean of other rows,
and a loss may look at all rows together: then only one micro-batch is exact.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.utils._pytree import tree_map

from hydra_tune.batches import call_model
from hydra_tune.errors import CandidateError
from hydra_tune.graph.capture import untouched
from hydra_tune.training import Training

USUAL = 4
"""Micro-batches for each device, where the user says nothing."""


def bounds(rows: int, count: int) -> list[tuple[int, int]]:
    """Where each of `count` micro-batches begins and ends: as even as it goes."""
    small, more = divmod(rows, count)
    ends = [index * small + min(index, more) for index in range(count + 1)]
    return list(itertools.pairwise(ends))


def split(tree: Any, rows: int, start: int, stop: int) -> Any:
    """The rows from `start` to `stop` of a batch, where it is made of rows."""
    if (start, stop) == (0, rows):
        return tree

    def some(leaf: Any) -> Any:
        return leaf[start:stop] if isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == rows else leaf

    return tree_map(some, tree)


def microbatches_for(training: Training, asked: int | None, devices: int) -> tuple[int, str]:
    """How many micro-batches a batch is cut into, and a word of warning where that is not exact.

    Without a wish: some for each device where that is exact, else one.
    """
    rows = training.batches.rows_at(0)
    if asked is not None and asked > rows:
        raise CandidateError(f"microbatches is {asked}, but a batch has {rows} rows", f"give {rows} or less")
    count = min(USUAL * devices, rows) if asked is None else asked
    if count == 1:
        return 1, ""
    why = _why_not_exact(training, count)
    if not why:
        return count, ""
    if asked is None:
        return 1, f"one micro-batch: {why}"
    if why.startswith("the loss"):
        raise CandidateError(f"microbatches is {asked}, but {why}", "use 1, or a loss that is a mean over rows")
    return count, f"the result is not that of whole batches: {why}"


def _why_not_exact(training: Training, count: int) -> str:
    """Why micro-batches, weighted by their rows, do not give the whole batch's step; empty where they do."""
    model, candidate = training.model, training.candidate
    inputs, targets = training.batches.fetch(0, 0)
    rows = training.batches.rows_at(0)
    with untouched(model), torch.no_grad():
        model.train()
        before = torch.get_rng_state()
        buffers = [(buffer, buffer._version) for buffer in model.buffers()]
        whole = candidate.loss(call_model(model, inputs), targets)
        if not torch.equal(before, torch.get_rng_state()):
            return "the model draws random numbers, such as for dropout"
        now = list(model.buffers())
        if len(now) != len(buffers) or any(
            a is not b or a._version != v for a, (b, v) in zip(now, buffers, strict=True)
        ):
            return "the model's forward changes buffers, as batch-norm does"
        total = 0.0
        for start, stop in bounds(rows, count):
            outputs = call_model(model, split(inputs, rows, start, stop))
            total += float(candidate.loss(outputs, split(targets, rows, start, stop))) * (stop - start) / rows
    tolerance = 100 * torch.finfo(whole.dtype).eps * max(abs(float(whole)), 1e-3)
    if abs(total - float(whole)) > tolerance:
        return f"the loss of {count} micro-batches, weighted by rows, is {total:.9g} instead of {float(whole):.9g}"
    return ""
