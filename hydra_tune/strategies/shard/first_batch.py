"""Compares a trial's first batch in shards with the same batch run by the whole model.

The builder has the whole model, so it runs the batch once with the trial's own random numbers, if the host has the
memory. The device that trains the batch in shards must get the same loss and the same gradients, up to rounding: else
the trial ends with the difference, instead of with other weights than a plain loop's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
import torch
from torch import nn

from hydra_tune.core.devices import format_bytes
from hydra_tune.core.errors import CandidateError
from hydra_tune.graph.capture import untouched
from hydra_tune.graph.costs import NodeCost
from hydra_tune.graph.pilot_contents import contents_restored
from hydra_tune.training.candidate import batch_loss
from hydra_tune.training.loop import Training

SAME = "the first batch in shards gave the loss and the gradients of the whole model"
NOT_COMPARED = "the first batch was not compared with the whole model's"
HOST_SHARE = 0.5
"""Largest share of the host's available memory that the whole batch may take."""
SAME_LOSS = {torch.float64: 1e-8, torch.float32: 1e-4}
"""Relative difference of two losses that counts as rounding, by the type of the parameters."""
SAME_GRADIENT = {torch.float64: 1e-6, torch.float32: 1e-2}
"""Difference of a gradient's norms, relative to the norm, that counts as rounding."""
COARSE_LOSS, COARSE_GRADIENT = 2e-2, 2e-1
"""The same for types of 16 bits."""
NEGLIGIBLE = 1e-3
"""Gradients below this share of the largest one are compared with that share of it: they may be nothing but rounding.
"""


@dataclass(frozen=True)
class FirstBatch:
    """Loss and norms of the gradients, by parameter, of a batch."""

    loss: float
    gradients: Mapping[str, float]


def first_batch(
    training: Training, nodes: Sequence[NodeCost], rewritten: Sequence[str]
) -> tuple[FirstBatch | None, str]:
    """Run a fresh trial's first batch by the whole model, which is left as it was; else return None and the reason.

    `rewritten` names the parameters that the forward itself changes.
    """
    if training.epoch or training.batch:
        return None, "the trial goes on from a checkpoint"
    needed = sum(node.parameter_bytes + node.activation_bytes for node in nodes)
    needed += max((node.peak_bytes for node in nodes), default=0)
    if needed > HOST_SHARE * psutil.virtual_memory().available:
        return None, f"the whole model takes {format_bytes(needed)}, for which the host has no room"
    candidate, model = training.candidate, training.model
    others = [candidate.loss] if isinstance(candidate.loss, nn.Module) else []
    with contents_restored(model, *others), _weights_restored(model, rewritten), untouched(model):
        model.train()
        training.begin_streams()
        inputs, targets = training.batches.fetch(0, 0)
        loss = batch_loss(candidate, training.forward(inputs), targets)
        if loss.requires_grad:
            (loss / candidate.accumulate).backward()  # type: ignore[no-untyped-call]
        named = model.named_parameters()
        norms = {name: _norm(p.grad) for name, p in named if p.grad is not None}
        model.zero_grad()
    return FirstBatch(float(loss.detach()), norms), ""


@contextmanager
def _weights_restored(model: nn.Module, rewritten: Sequence[str]) -> Iterator[None]:
    parameters = dict(model.named_parameters())
    before = {name: (parameters[name].data, parameters[name].detach().clone()) for name in rewritten}
    try:
        yield
    finally:
        for name, (data, content) in before.items():
            parameters[name].data = data
            data.copy_(content)


def _norm(gradient: torch.Tensor) -> float:
    dense = gradient.coalesce().values() if gradient.is_sparse else gradient
    return float(torch.linalg.vector_norm(dense.detach()))


@dataclass
class Comparison:
    """Collects what the first batch gives in shards, to compare it with the whole model's."""

    expected: FirstBatch
    loss: float = math.nan
    squares: dict[str, float] = field(default_factory=dict)
    """Squared norm of each gradient."""
    parts: set[str] = field(default_factory=set)
    """Parameters whose gradients came in parts: the norm of the sum cannot be computed from those of the parts."""

    def add_gradient(self, name: str, gradient: torch.Tensor) -> None:
        """Note a parameter's finished gradient."""
        if name in self.squares:
            self.parts.add(name)
        self.squares[name] = _norm(gradient) ** 2

    def check(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Raise CandidateError if the loss or a gradient differs by more than rounding; `dtypes` by parameter."""
        expected = self.expected
        coarsest = max(dtypes.values(), key=lambda dtype: SAME_LOSS.get(dtype, COARSE_LOSS), default=torch.float32)
        if _differ(self.loss, expected.loss, SAME_LOSS.get(coarsest, COARSE_LOSS)):
            raise _refusal("the loss", self.loss, expected.loss)
        floor = NEGLIGIBLE * max(expected.gradients.values(), default=0.0)
        tolerance = SAME_GRADIENT.get(coarsest, COARSE_GRADIENT)
        for name in sorted(expected.gradients.keys() | self.squares.keys()):
            if name in self.parts:
                continue
            norm, other = math.sqrt(self.squares.get(name, 0.0)), expected.gradients.get(name, 0.0)
            if abs(norm - other) > tolerance * max(norm, other, floor):
                raise _refusal(f"the gradient of {name!r} has norm", norm, other)


def _differ(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) > tolerance * max(abs(one), abs(other), 1e-3)


def _refusal(what: str, found: float, expected: float) -> CandidateError:
    verb = "" if what.endswith("norm") else " is"
    return CandidateError(
        f"in shards {what}{verb} {found:.6g} in the first batch, and {expected:.6g} if the whole model runs it",
        "does the model or its data keep state outside of modules, or draw from generators of its own? "
        "Keep it in the module, or use strategy whole",
    )
