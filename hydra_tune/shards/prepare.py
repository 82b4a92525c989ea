"""From a built candidate to a trial in shards: capture, profile, partition, and the kit that workers train from."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hydra_tune.batches import some_rows
from hydra_tune.builds import Prepared
from hydra_tune.candidate import Candidate
from hydra_tune.graph.capture import Captured, capture
from hydra_tune.graph.costs import ShardCost, covering, judging
from hydra_tune.graph.partition import partition
from hydra_tune.graph.placement.crowding import company
from hydra_tune.graph.profile import Profile, profile, tensors_of
from hydra_tune.graph.profile_cache import keep_profile, load_profile, profile_key
from hydra_tune.shards.optimizers import OptimizerParts
from hydra_tune.shards.plan import NOT_PRUNED, Pruned, make_plan
from hydra_tune.shards.trial import Kit
from hydra_tune.training import Training

SPILL_BYTES_PER_SECOND = 4e9
"""What copying to and from host memory reaches on common machines; it only weighs spilling against computing again."""
PILOT_ROWS = 3
"""Enough to record a model by; not one or two, which a model may take for something else."""
TRANSFER_SHARE = 0.1
"""Of the budget, for the shard that is brought in while another one computes."""


@dataclass(frozen=True)
class Prospect:
    """A candidate that can be cut, and what its nodes cost."""

    captured: Captured
    profile: Profile
    parts: OptimizerParts
    deferred: bool
    pruned: Pruned = NOT_PRUNED
    judged_batches: float = 0.0
    """How many times the measured batch the largest of the validation data is."""
    metric_bytes: int = 0
    """What loss and metrics take for a moment in evaluation."""

    def shards(self, budget: int) -> tuple[ShardCost, ...]:
        """The fewest shards that fit a device; raises Infeasible where none do."""
        cut = partition(
            self.profile.nodes, budget, input_bytes=self.profile.input_bytes, transfer_fraction=TRANSFER_SHARE,
            deferred=self.deferred,
        )  # fmt: skip
        return cut.shards


def examine(training: Training, profiles: Path, rows: int | None = None, beside: int = 0) -> Prospect:
    """Capture and profile a candidate, for a batch or so many rows of one, beside so many cores at work.

    What an earlier trial with the same costs has shown is not measured again.
    """
    candidate, model = training.candidate, training.model
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = candidate.optimizer(list(model.parameters()))
    parts = OptimizerParts.of(optimizer, names)
    batch = _Batch.of(training, rows)
    pilot = some_rows(batch.inputs, batch.rows, 0, PILOT_ROWS)
    captured = capture(model, pilot, batches=())
    found = load_profile(profiles, _key(training, captured, parts, batch, beside))
    if found is None:
        captured = capture(model, pilot, [batch.inputs, *_smaller_batches(training), pilot])
        # What does not pass the check is captured in larger nodes, and known by those.
        found = load_profile(profiles, _key(training, captured, parts, batch, beside))
    if found is None:
        found = _measured(training, captured, parts, batch, profiles, beside)
    # Some optimizers make their state at once, for parameters too that are frozen.
    made = {names[id(parameter)]: tensors_of(kept) for parameter, kept in optimizer.state.items()}
    found = replace(found, state={**made, **found.state})
    captured = replace(captured, program=replace(captured.program, mutated=found.mutated))
    return Prospect(captured, found, parts, candidate.clip_grad_norm is not None or candidate.accumulate > 1)


def with_evaluation(prospect: Prospect, training: Training, rows: int | None, metric_bytes: int = 0) -> Prospect:
    """The same, measured with so many rows, with what evaluation will take."""
    largest = 0 if training.valid is None else training.valid.rows_at(0)
    measured = training.batches.rows_at(0) if rows is None else rows
    return replace(prospect, judged_batches=largest / measured, metric_bytes=metric_bytes)


def examine_mixed(prospect: Prospect, training: Training, profiles: Path, rows: int | None = None) -> Prospect:
    """A candidate that was captured before, measured again with a model some of whose weights have 16 bits now."""
    captured = replace(prospect.captured, program=replace(prospect.captured.program, mixed=True))
    batch = _Batch.of(training, rows)
    found = load_profile(profiles, _key(training, captured, prospect.parts, batch))
    if found is None:
        found = _measured(training, captured, prospect.parts, batch, profiles)
    return replace(prospect, captured=captured, profile=found)


def examine_again(prospect: Prospect, candidate: Candidate, inputs: Any, targets: Any, *, judged: bool) -> Prospect:
    """The costs of a candidate that cover one more batch, which took more than the first one: in training, or judged.

    The model has to have its weights.
    """
    batch = _Batch(inputs, targets, 0)
    found = _profiled(candidate, prospect.captured, prospect.parts, batch)
    cover = judging if judged else covering
    nodes = tuple(cover(one, other) for one, other in zip(prospect.profile.nodes, found.nodes, strict=True))
    most = max(prospect.profile.input_bytes, found.input_bytes)
    return replace(prospect, profile=replace(prospect.profile, nodes=nodes, input_bytes=most))


@dataclass(frozen=True)
class _Batch:
    """What a candidate is measured with."""

    inputs: Any
    targets: Any
    rows: int

    @classmethod
    def of(cls, training: Training, rows: int | None) -> _Batch:
        """The first batch, or so many rows of it."""
        inputs, targets = training.batches.fetch(0, 0)
        whole = training.batches.rows_at(0)
        if rows is None:
            return cls(inputs, targets, whole)
        return cls(some_rows(inputs, whole, 0, rows), some_rows(targets, whole, 0, rows), rows)


def _key(training: Training, captured: Captured, parts: OptimizerParts, batch: _Batch, beside: int = 0) -> str:
    shapes = shapes_of(captured.program.bind(batch.inputs)), shapes_of([batch.targets]), beside
    return profile_key(
        _architecture(training.model, captured), shapes, _optimizer_facts(parts), name_of(training.candidate.loss),
        tuple(training.candidate.split_points),
    )  # fmt: skip


def _measured(
    training: Training, captured: Captured, parts: OptimizerParts, batch: _Batch, profiles: Path, beside: int = 0
) -> Profile:  # fmt: skip
    """Measure every node, and keep that for later trials."""
    there = True

    @contextmanager
    def beside_others() -> Iterator[None]:
        nonlocal there
        with company(beside) as there:
            yield

    found = _profiled(training.candidate, captured, parts, batch, beside_others())
    if there:
        keep_profile(profiles, _key(training, captured, parts, batch, beside), found)
    return found


def _profiled(
    candidate: Candidate, captured: Captured, parts: OptimizerParts, batch: _Batch,
    timed_in: AbstractContextManager[None] | None = None,
) -> Profile:  # fmt: skip
    return profile(
        candidate.model, captured, captured.program.bind(batch.inputs),
        lambda outputs: candidate.loss(outputs, batch.targets),
        lambda name, parameter: parts.for_parameter(parameter, parts.pristine[parts.group_of[name]])
        if name in parts.group_of else None,
        candidate.split_points, timed_in,
    )  # fmt: skip


def _smaller_batches(training: Training) -> list[Any]:
    """The inputs of the last batch of an epoch, where that is smaller than the others."""
    last = len(training.batches) - 1
    smaller = training.batches.rows_at(last) != training.batches.rows_at(0)
    return [training.batches.fetch(0, last)[0]] if smaller else []


def make_kit(
    prospect: Prospect, costs: Sequence[ShardCost], prepared: Prepared, seed: int, budget: int,
    tensors: dict[str, torch.Tensor], *, between_steps: bool = False,
) -> Kit:  # fmt: skip
    """What workers need to train a candidate that is cut so; the model in it is still whole."""
    plan = make_plan(
        prospect.captured, costs, tensors, prospect.profile.state, deferred=prospect.deferred, pruned=prospect.pruned
    )  # fmt: skip
    return Kit(
        prepared.candidate, prepared.train, prepared.valid, seed, prospect.captured.program, plan, prospect.parts,
        recompute(costs, budget), between_steps,
    )  # fmt: skip


def recompute(costs: Sequence[ShardCost], budget: int) -> frozenset[int]:
    """The shards whose forward is quicker to run again than its activations are to write and read.

    Those that stay on the device beside the largest shard cost nothing: the last shards', which are needed first.
    """
    room = budget * (1 - TRANSFER_SHARE) - max(cost.device_bytes for cost in costs)
    again = set()
    for index, cost in reversed(list(enumerate(costs[:-1]))):
        if cost.activation_bytes <= room:
            room -= cost.activation_bytes
        elif cost.forward_seconds < 2 * cost.activation_bytes / SPILL_BYTES_PER_SECOND:
            again.add(index)
    return frozenset(again)


def hollow(model: nn.Module) -> None:
    """Take the contents out of a model's parameters and buffers: a skeleton to attach blocks to."""
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = torch.empty(0, dtype=tensor.dtype)
        tensor.grad = None


def _architecture(model: nn.Module, captured: Captured) -> Any:
    operations = [(op.kind, op.label, repr(op.args), repr(op.kwargs)) for op in captured.program.training]
    tensors = [(n, tuple(t.shape), str(t.dtype), t.requires_grad) for n, t in model.named_parameters()]
    buffers = [(n, tuple(t.shape), str(t.dtype)) for n, t in model.named_buffers()]
    return operations, tensors, buffers, repr(model)


def shapes_of(tree: Any) -> Any:
    """The shapes of all tensors, and what else there is."""
    leaves = tree_leaves(tree)
    return [(tuple(t.shape), str(t.dtype)) if isinstance(t, torch.Tensor) else repr(t) for t in leaves]


def name_of(loss: Any) -> str:
    """A loss by its name, which is the same in every process."""
    if isinstance(loss, functools.partial):
        return name_of(loss.func)
    if isinstance(loss, nn.Module):
        return repr(loss)
    named = loss if hasattr(loss, "__qualname__") else type(loss)
    return f"{named.__module__}.{named.__qualname__}"


def _optimizer_facts(parts: OptimizerParts) -> Any:
    """What of an optimizer changes costs: its class and its switches, not its rates."""
    switches = [
        sorted((key, str(value)) for key, value in options.items() if isinstance(value, bool | str) or value is None)
        for options in parts.pristine
    ]
    momentum = [bool(options.get("momentum")) for options in parts.pristine]
    return parts.kind.__qualname__, sorted(parts.group_of.items()), switches, momentum
