"""Compares the first batches of a pack with plain models: a pack goes on only if they agree.

A model may do what no batched form can know, such as keeping a number from call to call. The first batch of each size
is therefore also run by copies of some members, one by one.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

from hydra_tune.core.random_state import RandomState
from hydra_tune.core.trees import call_model
from hydra_tune.strategies.pack.member import Member
from hydra_tune.strategies.pack.refusal import CannotPack
from hydra_tune.strategies.pack.streams import Streams
from hydra_tune.training.candidate import batch_loss

COMPARED = 2
"""Members that are compared."""

Check = Callable[[torch.Tensor, Mapping[str, "torch.Tensor | None"], Mapping[str, torch.Tensor], Streams], None]


@dataclass(frozen=True)
class _Plain:
    """One batch of one member, by a copy of its model."""

    loss: float
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    random: RandomState


def comparison(members: Sequence[Member], inputs: Any, targets: Any, streams: Streams) -> Check:
    """Run a batch by copies of these members; return the check of the pack's results."""
    plain = []
    for row, member in enumerate(members):
        own_inputs, own_targets = tree_map(operator.itemgetter(row), (inputs, targets))
        plain.append(_run(member, own_inputs, own_targets, streams.captured(row)))

    def check(
        losses: torch.Tensor,
        gradients: Mapping[str, torch.Tensor | None],
        buffers: Mapping[str, torch.Tensor],
        streams: Streams,
    ) -> None:
        accumulate = members[0].candidate.accumulate
        for row, one in enumerate(plain):
            if not _close(losses[row], torch.tensor(one.loss, dtype=torch.float64).to(losses)):
                raise CannotPack(f"its loss in a pack is {float(losses[row]):.6g}, alone {one.loss:.6g}")
            largest = max((float(each.abs().max()) for each in one.gradients.values() if each is not None), default=0.0)
            for name, expected in one.gradients.items():
                found = gradients.get(name)
                if (found is None) != (expected is None):
                    raise CannotPack(f"{name!r} has a gradient in a pack or alone only")
                if (
                    found is not None
                    and expected is not None
                    and not _close(found[row] * accumulate, expected, largest)
                ):
                    raise CannotPack(f"the gradient of {name!r} in a pack differs from that alone")
            for name, buffer in one.buffers.items():
                if not _close(buffers[name][row], buffer):
                    raise CannotPack(f"{name!r} in a pack differs from that alone")
            if not streams.captured(row).same_as(one.random):
                raise CannotPack("it draws other random numbers in a pack than alone")

    return check


def _run(member: Member, inputs: Any, targets: Any, random: RandomState) -> _Plain:
    model = copy.deepcopy(member.model)
    model.train()
    outside = RandomState.capture(member.device)
    random.restore(member.device)
    try:
        loss = batch_loss(member.candidate, call_model(model, inputs), targets)
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        parameters = dict(model.named_parameters())
        found = torch.autograd.grad(loss.sum(), [parameters[name] for name in names], allow_unused=True)
        after = RandomState.capture(member.device)
    finally:
        outside.restore(member.device)
    buffers = {name: buffer.detach() for name, buffer in model.named_buffers()}
    return _Plain(float(loss.detach()), dict(zip(names, found, strict=True)), buffers, after)


def _close(found: torch.Tensor, expected: torch.Tensor, size: float = 1e-3) -> bool:
    """True if two tensors agree up to rounding, relative to their largest number and to `size`.

    A gradient that is zero but for rounding, as of a bias before batch-norm, is compared by the size of the others.
    """
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    tolerance = torch.finfo(expected.dtype).eps ** 0.5
    finite = torch.isfinite(expected)
    if not torch.equal(torch.isfinite(found), finite):
        return False
    found, expected = found[finite], expected[finite]
    if not expected.numel():
        return True
    return bool((found - expected).abs().max() <= tolerance * (expected.abs().max() + size))
