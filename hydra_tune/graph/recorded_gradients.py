"""Compares the gradients of a recording with those of the model that it was made of.

Outputs alone do not show everything: a hook that the forward sets on a tensor changes the backward only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hydra_tune.core.trees import call_model
from hydra_tune.graph.program import Program

TOLERANCE = 1000
"""Tolerance in multiples of a dtype's epsilon, for sums in another order."""
Gradients = Sequence[torch.Tensor | None]


def other_gradients(program: Program, model: nn.Module, inputs: Any) -> str:
    """Say how the gradients of a recording differ from those of the model; empty if they do not.

    The model is in training mode; its random streams and attributes go on, and have to be restored by the caller.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not named:
        return ""
    streams = torch.get_rng_state()
    with torch.enable_grad():
        try:
            expected = _gradients(call_model(model, inputs), list(named.values()))
        except RuntimeError:
            return ""  # some backwards, as that of reentrant checkpoints, run by `backward` only
        torch.set_rng_state(streams)
        values = dict(enumerate(program.bind(inputs)))
        try:
            program.run(model, values, 0, len(program), training=True)
            found = _gradients(program.outputs(values), list(named.values()))
        except RuntimeError as error:
            return f"its backward does not run again ({str(error).splitlines()[0][:120]})"
    pairs = zip(named, found, expected, strict=True)
    other = next((name for name, one, other in pairs if not _alike(one, other)), "")
    return f"its recording gives parameter {other!r} another gradient" if other else ""


def _gradients(outputs: Any, parameters: Sequence[nn.Parameter]) -> Gradients:
    """Return the gradients of a sum of all outputs, each number with a weight of its own."""
    total: Any = 0.0
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_complex():
            total = total + (leaf.flatten() * torch.linspace(0.5, 1.5, leaf.numel(), dtype=leaf.dtype)).sum()
    if not isinstance(total, torch.Tensor):
        return [None] * len(parameters)
    return torch.autograd.grad(total, parameters, allow_unused=True)


def _alike(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    if found is None or expected is None:
        one = found if expected is None else expected
        return one is None or not bool(one.detach().any())
    if found.is_sparse or expected.is_sparse:
        found, expected = found.to_dense(), expected.to_dense()
    found, expected = found.nan_to_num(), expected.nan_to_num()
    if not expected.numel():
        return True
    difference, scale = float((found - expected).abs().max()), float(expected.abs().max())
    return difference <= TOLERANCE * torch.finfo(expected.dtype).eps * scale
