"""Dividing a batch into micro-batches, and checking that their step equals that of the whole batch.

Each micro-batch is weighted by its rows. For a loss that is a mean over rows, the weighted sum is the batch's loss, and
its gradient the batch's gradient. Dropout draws other numbers for other batches, batch-norm averages over other rows,
and a loss may use all rows together: then only one micro-batch is exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from hydra_tune.core.errors import CandidateError
from hydra_tune.core.random_state import RandomState
from hydra_tune.core.trees import call_model, some_rows
from hydra_tune.graph.capture import untouched
from hydra_tune.strategies.pipeline.schedule import bounds
from hydra_tune.training.loop import Training
from hydra_tune.training.prepared import hooked_tensor

USUAL = 4
"""Default number of micro-batches per device."""
NOISE = 0.5
ROUNDING = 1000
"""Tolerance in multiples of a dtype's epsilon, for sums in another order."""


def microbatches_for(training: Training, asked: int | None, devices: int) -> tuple[int, str]:
    """Return the number of micro-batches, and a warning if the result is not exact.

    By default USUAL per device if that is exact, else one.
    """
    rows = training.batches.rows_at(0)
    if asked is not None and asked > rows:
        raise CandidateError(f"microbatches is {asked}, but a batch has {rows} rows", f"give {rows} or less")
    _refuse_loss_of_parameters(training)
    count = min(USUAL * devices, rows) if asked is None else asked
    if count == 1:
        return 1, ""
    try:
        _check(training, count)
    except _Differs as error:
        if asked is None:
            return 1, f"one micro-batch: {error}"
        if not error.bearable:
            raise CandidateError(f"microbatches is {asked}, but {error}", "use microbatches: 1") from error
        return count, f"the result is not that of whole batches: {error}"
    return count, ""


def why_not_apart(training: Training, count: int) -> str:
    """Return the reason why a batch in `count` parts has another loss than the whole; empty if the loss is the same.

    Dropout and batch statistics differ in any case, and are no reason.
    """
    try:
        _check(training, min(count, training.batches.rows_at(0)))
    except _Differs as error:
        return "" if error.bearable else str(error)
    return ""


class _Differs(Exception):
    """Micro-batches do not give the step of the whole batch; `bearable` if the user may accept the difference."""

    def __init__(self, why: str, *, bearable: bool = False) -> None:
        super().__init__(why)
        self.bearable = bearable


def _refuse_loss_of_parameters(training: Training) -> None:
    """Refuse a loss that uses the model's parameters: in a pipeline they are on other devices."""
    inputs, targets = training.batches.fetch(0, 0)
    with untouched(training.model):
        training.model.train()
        with torch.no_grad():
            outputs = call_model(training.model, inputs)
        loss = training.candidate.loss(outputs, targets)
    parameters = [parameter for parameter in training.model.parameters() if parameter.requires_grad]
    if not loss.requires_grad or not parameters:
        return
    if any(gradient is not None for gradient in torch.autograd.grad(loss, parameters, allow_unused=True)):
        raise CandidateError("the loss uses the model's parameters", "use --strategy whole, or weight_decay")


def _check(training: Training, count: int) -> None:
    """Raise if micro-batches, weighted by their rows, do not give the whole batch's loss and gradients.

    Model outputs are compared directly. The loss is tested on outputs with added noise: a new model may give equal
    outputs for all rows, and then even a loss that weights rows looks like a mean.
    """
    model = training.model
    inputs, targets = training.batches.fetch(0, 0)
    rows = training.batches.rows_at(0)
    parts = bounds(rows, count)
    hooked = hooked_tensor(model)
    if hooked:
        raise _Differs(f"{hooked!r} has a hook, which would see the gradient of each micro-batch")
    if not any(isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == rows for leaf in tree_leaves(inputs)):
        raise _Differs("no input has the rows of a batch first")
    with untouched(model), torch.no_grad():
        model.train()
        streams, buffers = RandomState.capture(), [(buffer, buffer._version) for buffer in model.buffers()]
        whole = call_model(model, inputs)
        draws = not streams.same_as(RandomState.capture())
        now = list(model.buffers())
        changes = len(now) != len(buffers) or any(
            a is not b or a._version != v for a, (b, v) in zip(now, buffers, strict=True)
        )
        if draws or changes:
            # All else must hold all the same: it is looked at without dropout and batch statistics.
            model.eval()
            whole = call_model(model, inputs)
        try:
            pieces = [call_model(model, some_rows(inputs, rows, start, stop)) for start, stop in parts]
        except Exception as error:
            raise _Differs(f"the model cannot take a part of a batch ({type(error).__name__}: {error})") from error
        for piece, (start, stop) in zip(pieces, parts, strict=True):
            if not _alike(_with_rows(piece, whole, rows), some_rows(_with_rows(whole, whole, rows), rows, start, stop)):
                raise _Differs("the model gives rows other outputs in another batch")
        if any(not _has_rows(leaf, rows) for leaf in tree_leaves(whole)):
            _check_inside(training, inputs, targets, parts)
    _check_loss(training, whole, targets, parts)
    if draws:
        raise _Differs("the model draws random numbers, such as for dropout", bearable=True)
    if changes:
        raise _Differs("the model's forward changes buffers, as batch-norm does", bearable=True)


def _has_rows(leaf: Any, rows: int) -> bool:
    return not isinstance(leaf, torch.Tensor) or (leaf.dim() > 0 and len(leaf) == rows)


def _with_rows(outputs: Any, whole: Any, rows: int) -> list[Any]:
    """Return those leaves of outputs that in the whole batch's outputs have its rows."""
    return [one for one, other in zip(tree_leaves(outputs), tree_leaves(whole), strict=True) if _has_rows(other, rows)]


def _check_inside(training: Training, inputs: Any, targets: Any, parts: list[tuple[int, int]]) -> None:
    """Raise if a model that gives more than rows, such as a loss of its own, has other gradients in parts."""
    rows, model = parts[-1][1], training.model
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def learned(start: int, stop: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        with torch.enable_grad():
            outputs = call_model(model, some_rows(inputs, rows, start, stop))
            loss = training.candidate.loss(outputs, some_rows(targets, rows, start, stop)) * ((stop - start) / rows)
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
        filled = (torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True))
        return loss.detach(), [each.detach().flatten() for each in filled]

    whole, expected = learned(0, rows)
    losses, gradients = zip(*(learned(start, stop) for start, stop in parts), strict=True)
    cut = torch.stack(losses).sum()
    found = torch.cat([torch.stack(each).sum(0) for each in zip(*gradients, strict=True)])
    if not _alike(cut, whole) or not _alike(found, torch.cat(expected)):
        raise _Differs(_no_mean(len(parts), cut, whole))


def _no_mean(count: int, cut: torch.Tensor, whole: torch.Tensor) -> str:
    found, expected = f"{float(cut):.9g}", f"{float(whole):.9g}"
    if found == expected:
        differs = "other gradients than the batch"
    else:
        differs = f"{found} as their loss instead of {expected}"
    return f"{count} micro-batches, weighted by rows, have {differs}: the loss is no mean over rows"


def _check_loss(training: Training, outputs: Any, targets: Any, parts: list[tuple[int, int]]) -> None:
    rows = parts[-1][1]
    generator = torch.Generator().manual_seed(0)

    def noisy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        noise = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
        return (leaf + NOISE * (leaf.std(correction=0) + 1) * noise).requires_grad_()

    tried = tree_map(noisy, outputs)
    leaves = [leaf for leaf in tree_leaves(tried) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    loss = training.candidate.loss
    try:
        whole = loss(tried, targets)
        cut = torch.stack([
            loss(some_rows(tried, rows, a, b), some_rows(targets, rows, a, b)) * ((b - a) / rows) for a, b in parts
        ]).sum()  # fmt: skip
        expected, found = (torch.autograd.grad(each, leaves, allow_unused=True) for each in (whole, cut))
    except Exception as error:
        raise _Differs(f"the loss cannot take a part of a batch ({type(error).__name__}: {error})") from error
    whole, cut = whole.detach(), cut.detach()
    if not _alike(cut, whole) or not _alike(list(found), list(expected)):
        raise _Differs(_no_mean(len(parts), cut, whole))


def _alike(found: Any, expected: Any) -> bool:
    """True if two trees of tensors are equal up to rounding; NaN equals nothing."""
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
            continue
        if one.shape != other.shape:
            return False
        if other.is_floating_point() and other.numel():
            difference, scale = float((one - other).detach().abs().max()), float(other.detach().abs().max())
            if not difference <= ROUNDING * torch.finfo(other.dtype).eps * scale:
                return False
    return True
