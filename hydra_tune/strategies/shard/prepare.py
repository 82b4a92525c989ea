"""Prepares a candidate for shards (observe, partition, kit) and for stages (capture, profile)."""

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

from hydra_tune.core.errors import Infeasible
from hydra_tune.core.trees import call_model, some_rows
from hydra_tune.graph.capture import Captured, capture
from hydra_tune.graph.costs import NodeCost, ShardCost, at_least, covering, judging, shard_cost
from hydra_tune.graph.observation_cache import keep_observation, load_observation
from hydra_tune.graph.observe import Observation, Observed, observe
from hydra_tune.graph.partition import partition
from hydra_tune.graph.pilot_contents import contents_restored
from hydra_tune.graph.pilot_steps import PilotOptimizer, tensors_of
from hydra_tune.graph.placement.crowding import company
from hydra_tune.graph.profile import Profile, profile
from hydra_tune.graph.profile_cache import keep_profile, load_profile, profile_key
from hydra_tune.graph.program import HALF, in_full
from hydra_tune.strategies.shard.kit import Kit
from hydra_tune.strategies.shard.optimizers import OptimizerParts
from hydra_tune.strategies.shard.plan import NOT_PRUNED, PrunedParameters, make_plan
from hydra_tune.strategies.shard.skeleton import check_parameters
from hydra_tune.training.candidate import Candidate, batch_loss
from hydra_tune.training.loop import Training
from hydra_tune.training.prepared import Prepared

PILOT_ROWS = 3
"""Rows of the batch that a model is recorded with; a model may treat one or two rows as something else."""
TRANSFER_SHARE = 0.1
"""Share of the budget kept free for the shard that is brought in while another one computes."""
MARGIN = 0.03
"""Share of a tight budget kept free for batches that take a little more than the measured one."""


@dataclass(frozen=True)
class Prospect:
    """A measured candidate: its recorded or observed nodes, their costs, and the parts of its optimizer."""

    captured: Captured | Observed
    profile: Profile
    parts: OptimizerParts
    deferred: bool
    pruned: PrunedParameters = NOT_PRUNED
    judged_batches: float = 0.0
    """Size of the largest validation batch divided by that of the measured batch, in rows."""
    metric_bytes: int = 0
    """Most bytes that loss and metrics take at once in evaluation."""
    batch_bytes: int = 0
    """Bytes of inputs and targets of the batch that an observed model was measured with."""

    @property
    def recorded(self) -> Captured:
        """Return the recorded program, for strategies that need data flow."""
        assert isinstance(self.captured, Captured)
        return self.captured

    @property
    def observed(self) -> Observed:
        """Return the observed nodes, for shards."""
        assert isinstance(self.captured, Observed)
        return self.captured

    def shards(self, budget: int) -> tuple[ShardCost, ...]:
        """Return the fewest shards that fit a device of `budget` bytes; raise Infeasible if none do.

        Where the activations of a shard do not fit beside it, they are spilled in the middle of it, and no room is kept
        free for the next shard.
        """
        nodes, inputs = self.profile.nodes, self.profile.input_bytes
        try:
            return partition(
                nodes, budget, input_bytes=inputs, transfer_fraction=TRANSFER_SHARE, deferred=self.deferred
            ).shards
        except Infeasible:
            least = tuple(map(at_least, nodes))
            found = partition(
                least, budget, input_bytes=inputs, transfer_fraction=MARGIN, deferred=self.deferred
            ).shards
            return tuple(
                shard_cost(nodes, each.start, each.stop, deferred=self.deferred, input_bytes=inputs) for each in found
            )


def examine(training: Training, profiles: Path, rows: int | None = None, beside: int = 0) -> Prospect:
    """Capture and profile a candidate, for a batch or the first `rows` of one, beside `beside` busy cores.

    A profile that an earlier trial with the same costs has stored in `profiles` is not measured again.
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


def observe_candidate(training: Training, profiles: Path, mixed: bool = False) -> Prospect:
    """Measure the nodes' costs in a candidate's first batch, unless an earlier trial with the same costs has."""
    candidate, model = training.candidate, training.model
    check_parameters(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = candidate.optimizer(list(model.parameters()))
    parts = OptimizerParts.of(optimizer, names)
    batch = _Batch.of(training, None)
    key = _observed_key(training, parts, batch, mixed)
    found = load_observation(profiles, key)
    if found is None:
        found = _observed(candidate, parts, batch, mixed)
        keep_observation(profiles, key, found)
    # Some optimizers make their state at once, for parameters too that are frozen.
    made = {names[id(parameter)]: tensors_of(kept) for parameter, kept in optimizer.state.items()}
    deferred = candidate.clip_grad_norm is not None or candidate.accumulate > 1 or found.observed.late
    nodes = tuple(map(_with_gradient, found.nodes)) if deferred else found.nodes
    profile = Profile(
        nodes, {**made, **found.state}, frozenset(), 0, draws=found.draws, changes_buffers=found.changes_buffers
    )
    return Prospect(found.observed, profile, parts, deferred, batch_bytes=found.input_bytes)


def _observed(candidate: Candidate, parts: OptimizerParts, batch: _Batch, mixed: bool) -> Observation:
    def forward(inputs: Any) -> Any:
        if not mixed:
            return call_model(candidate.model, inputs)
        with torch.autocast("cpu", dtype=HALF):
            return in_full(call_model(candidate.model, inputs))

    others = [candidate.loss] if isinstance(candidate.loss, nn.Module) else []
    with contents_restored(candidate.model, *others):
        return observe(
            candidate.model, forward, functools.partial(batch_loss, candidate), _pilot_optimizer(parts),
            (batch.inputs, batch.targets), candidate.split_points, mixed=mixed,
        )  # fmt: skip


def _with_gradient(node: NodeCost) -> NodeCost:
    """Return the cost of a node whose gradients wait in a block, with room for the gradient that autograd just made."""
    more = node.largest_parameter_bytes
    return replace(
        node, backward_peak_bytes=node.backward_peak_bytes + more,
        stepless_peak_bytes=(node.stepless_peak_bytes or 0) + more,
        backward_held_bytes=(node.backward_held_bytes or 0) + more,
    )  # fmt: skip


def _pilot_optimizer(parts: OptimizerParts) -> PilotOptimizer:
    def made(name: str, parameter: nn.Parameter) -> torch.optim.Optimizer | None:
        group = parts.group_of.get(name)
        return None if group is None else parts.for_parameter(parameter, parts.pristine[group])

    return made


def _observed_key(training: Training, parts: OptimizerParts, batch: _Batch, mixed: bool) -> str:
    candidate, model = training.candidate, training.model
    tensors = [(n, tuple(t.shape), str(t.dtype), t.requires_grad) for n, t in model.named_parameters()]
    buffers = [(n, tuple(t.shape), str(t.dtype)) for n, t in model.named_buffers()]
    shapes = shapes_of([batch.inputs, batch.targets])
    return profile_key(
        "observed", mixed, type(model).__qualname__, repr(model), tensors, buffers, _hooks(model), shapes,
        _optimizer_facts(parts), name_of(candidate.loss), tuple(candidate.split_points),
    )  # fmt: skip


def with_evaluation(prospect: Prospect, training: Training, rows: int | None, metric_bytes: int = 0) -> Prospect:
    """Return a prospect that was measured with `rows` rows, with the size of evaluation added."""
    largest = 0 if training.valid is None else training.valid.rows_at(0)
    measured = training.batches.rows_at(0) if rows is None else rows
    return replace(prospect, judged_batches=largest / measured, metric_bytes=metric_bytes)


def examine_mixed(prospect: Prospect, training: Training, profiles: Path, rows: int | None = None) -> Prospect:
    """Return the prospect of a captured candidate, measured again with some of the model's weights in 16 bits."""
    captured = replace(prospect.recorded, program=replace(prospect.recorded.program, mixed=True))
    batch = _Batch.of(training, rows)
    found = load_profile(profiles, _key(training, captured, prospect.parts, batch))
    if found is None:
        found = _measured(training, captured, prospect.parts, batch, profiles)
    return replace(prospect, captured=captured, profile=found)


def observe_again(prospect: Prospect, candidate: Candidate, inputs: Any, targets: Any, *, judged: bool) -> Prospect:
    """Return the candidate's costs raised to cover one more batch, in training or, if `judged`, in evaluation.

    The model has to have its weights.
    """
    found = _observed(candidate, prospect.parts, _Batch(inputs, targets, 0), prospect.observed.mixed)
    if [n.calls for n in found.observed.nodes] != [n.calls for n in prospect.observed.nodes]:
        return prospect  # it takes another way through the model
    cover = judging if judged else covering
    others = tuple(map(_with_gradient, found.nodes)) if prospect.deferred else found.nodes
    nodes = tuple(cover(one, other) for one, other in zip(prospect.profile.nodes, others, strict=True))
    most = max(prospect.batch_bytes, found.input_bytes)
    return replace(prospect, profile=replace(prospect.profile, nodes=nodes), batch_bytes=most)


@dataclass(frozen=True)
class _Batch:
    """The batch that a candidate is measured with."""

    inputs: Any
    targets: Any
    rows: int

    @classmethod
    def of(cls, training: Training, rows: int | None) -> _Batch:
        """Return the first batch, or the first `rows` rows of it."""
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
    """Measure every node, and store the profile for later trials."""
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
        lambda outputs: batch_loss(candidate, outputs, batch.targets), _pilot_optimizer(parts), candidate.split_points,
        timed_in,
    )  # fmt: skip


def _smaller_batches(training: Training) -> list[Any]:
    """Return the inputs of an epoch's last batch, in a list, if it is smaller than the others; else an empty list."""
    last = len(training.batches) - 1
    smaller = training.batches.rows_at(last) != training.batches.rows_at(0)
    return [training.batches.fetch(0, last)[0]] if smaller else []


def make_kit(
    prospect: Prospect, costs: Sequence[ShardCost], prepared: Prepared, seed: int, tensors: dict[str, torch.Tensor], *,
    between_steps: bool = False,
) -> Kit:  # fmt: skip
    """Return the kit that workers need to train a candidate with this cut; the model in it is still whole."""
    plan = make_plan(
        prospect.observed, costs, tensors, prospect.profile.state, deferred=prospect.deferred,
        batch_bytes=prospect.batch_bytes, pruned=prospect.pruned,
    )  # fmt: skip
    return Kit(prepared, seed, plan, prospect.parts, prospect.observed.mixed, between_steps)


def hollow(model: nn.Module) -> None:
    """Take the contents out of a model's parameters and buffers: a skeleton to attach blocks to."""
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data = torch.empty(0, dtype=tensor.dtype)
        tensor.grad = None


def _architecture(model: nn.Module, captured: Captured) -> Any:
    operations = [(op.kind, op.label, repr(op.args), repr(op.kwargs)) for op in captured.program.training]
    tensors = [(n, tuple(t.shape), str(t.dtype), t.requires_grad) for n, t in model.named_parameters()]
    buffers = [(n, tuple(t.shape), str(t.dtype)) for n, t in model.named_buffers()]
    return operations, tensors, buffers, repr(model), _hooks(model)


def _hooks(model: nn.Module) -> list[tuple[str, int, int]]:
    """Return name and numbers of forward hooks for each module that has some: they run in a pilot batch too."""
    counts = [(name, len(m._forward_pre_hooks), len(m._forward_hooks)) for name, m in model.named_modules()]
    return [count for count in counts if count[1] or count[2]]


def shapes_of(tree: Any) -> Any:
    """Return shape and dtype of each tensor of a tree, and the text of every other leaf."""
    leaves = tree_leaves(tree)
    return [(tuple(t.shape), str(t.dtype)) if isinstance(t, torch.Tensor) else repr(t) for t in leaves]


def name_of(loss: Any) -> str:
    """Return a name for a loss that is the same in every process."""
    if isinstance(loss, functools.partial):
        return name_of(loss.func)
    if isinstance(loss, nn.Module):
        return repr(loss)
    named = loss if hasattr(loss, "__qualname__") else type(loss)
    return f"{named.__module__}.{named.__qualname__}"


def _optimizer_facts(parts: OptimizerParts) -> Any:
    """Return the facts of an optimizer that change costs: its class, groups and switches, not its rates."""
    switches = [
        sorted((key, str(value)) for key, value in options.items() if isinstance(value, bool | str) or value is None)
        for options in parts.pristine
    ]
    momentum = [bool(options.get("momentum")) for options in parts.pristine]
    return parts.kind.__qualname__, sorted(parts.group_of.items()), switches, momentum
