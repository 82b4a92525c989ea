"""Finds a model's `Structure`: the groups that can be dealt out, tested on a pilot batch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hydra_tune.core.errors import CandidateError
from hydra_tune.core.trees import call_model
from hydra_tune.graph.capture import Captured, capture, untouched
from hydra_tune.strategies.subnets.attention import attentions
from hydra_tune.strategies.subnets.blocks import blocks
from hydra_tune.strategies.subnets.deal import deal
from hydra_tune.strategies.subnets.heads import heads, units
from hydra_tune.strategies.subnets.neurons import Neurons
from hydra_tune.strategies.subnets.shrink import subnet
from hydra_tune.strategies.subnets.structure import Group, Structure

logger = logging.getLogger(__name__)


def find_structure(model: nn.Module, pilot: Any, subnets: int, how: str = "auto") -> Structure:
    """Return the groups to deal out to this many subnets; `pilot` is the input of a few rows.

    `width` deals neurons, filters and heads, `depth` residual blocks; `auto` takes depth if there are at least as many
    blocks as subnets. A model in which nothing can be dealt out is refused, with the reason.
    """
    captured = capture(model, pilot, batches=())
    by_depth = blocks(model, captured.program, pilot) if how != "width" else None
    if by_depth is not None and (how == "depth" or by_depth.width >= subnets):
        return _tried(model, pilot, subnets, [by_depth])
    if how == "depth":
        raise _nothing("it has no two residual blocks that can be left out", "give deal: width")
    found, why = _by_width(model, captured, pilot)
    if not found:
        raise _nothing(why)
    wide = [group for group in found if group.width >= subnets]
    if not wide:
        most = max(found, key=lambda group: group.width)
        raise _nothing(f"the {most.kind} of {most.name!r} are {most.width}", f"give {most.width} subnets or fewer")
    return _tried(model, pilot, subnets, wide)


def _by_width(model: nn.Module, captured: Captured, pilot: Any) -> tuple[list[Group], str]:
    """Return the groups, and the reason why there are not more."""
    sizes = _sizes(model, captured, pilot)
    neurons = Neurons(model, captured.program, sizes)
    found = neurons.groups()
    for name, module in model.named_modules():
        found += [group for group in (heads(name, module), units(name, module)) if group is not None]
    known = {cut.parameter for group in found for cut in group.cuts}
    others = attentions(model, captured.program, sizes, pilot)
    found += [group for group in others if not any(cut.parameter in known for cut in group.cuts)]
    closed = [f"the outputs of {name!r} belong to all, as {why}" for name, why in neurons.closed().items()]
    return found, captured.whole_because or "; ".join(closed[:3]) or "it has no hidden layers"


def _sizes(model: nn.Module, captured: Captured, pilot: Any) -> dict[int, tuple[int, ...]]:
    """Return the shape of every value of the program; empty if it is no tensor."""
    program = captured.program
    everything = range(len(program.inputs) + len(program))
    values = dict(enumerate(program.bind(pilot)))
    with untouched(model), torch.no_grad():
        program.run_some(model, values, range(len(program)), everything, training=False)
    return {value: tuple(t.shape) if isinstance(t, torch.Tensor) else () for value, t in values.items()}


def _tried(model: nn.Module, pilot: Any, subnets: int, groups: Sequence[Group]) -> Structure:
    """Return the groups with which the model's own forward runs: it may depend on a width in hidden ways."""
    if _failure(model, pilot, subnets, groups) is None:
        return Structure(tuple(groups))
    good: list[Group] = []
    reason = ""
    for group in groups:
        failure = _failure(model, pilot, subnets, [*good, group])
        if failure is None:
            good.append(group)
        else:
            reason = reason or f"its forward does not run with some {group.kind} of {group.name!r} ({failure})"
            logger.info("%r is not dealt out: %s", group.name, failure)
    if not good:
        raise _nothing(reason)
    return Structure(tuple(good))


def _failure(model: nn.Module, pilot: Any, subnets: int, groups: Sequence[Group]) -> str | None:
    """Return the reason why a subnet of these groups fails; None if it runs with outputs of the same shapes."""
    structure = Structure(tuple(groups))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    try:
        with untouched(model), torch.no_grad():
            parts = deal(structure, subnets, seed=0, turn=0)
            expected = _shapes(call_model(model, pilot))
            for dealt in (parts[0], parts[-1]):
                found = _shapes(call_model(subnet(model, structure, dealt, tensors).train(), pilot))
                if found != expected:
                    return f"its outputs are of sizes {found} instead of {expected}"
    except Exception as error:  # noqa: BLE001 - the forward is user code
        return f"{type(error).__name__}: {error}"
    return None


def _shapes(outputs: Any) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]


def _nothing(why: str, hint: str = "use another strategy for this model") -> CandidateError:
    return CandidateError(f"nothing of the model can be dealt out to subnets: {why}", hint)
