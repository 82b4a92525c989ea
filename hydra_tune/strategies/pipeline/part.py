"""One device's part of a pipelined trial: its stages, their parameters and optimizer, and the micro-batches in flight.

Each stage has its own autograd graph for each micro-batch: incoming values are leaves, and the gradients that
accumulate there are sent back to the stage that made the values. Gradients of parameters add up over the micro-batches,
each weighted by its rows, so the step is that of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from hydra_tune.core.metric_value import as_number
from hydra_tune.core.random_state import RandomState
from hydra_tune.core.tensor_memory import TensorBytes
from hydra_tune.core.trees import move, some_rows
from hydra_tune.spill.store import SpillFiles
from hydra_tune.strategies.pipeline.device_state import DeviceState, as_random, as_state
from hydra_tune.strategies.pipeline.halves import Halves, is_plain
from hydra_tune.strategies.pipeline.handover import Handover
from hydra_tune.strategies.pipeline.kit import PipelineKit
from hydra_tune.strategies.pipeline.schedule import bounds
from hydra_tune.strategies.pipeline.staged import Evaluated, Fetched, Forwarded, Random, Sent
from hydra_tune.strategies.pipeline.stages import TARGETS, Stage
from hydra_tune.training.batches import Batches
from hydra_tune.training.candidate import batch_loss
from hydra_tune.training.progress import Diverged

MEASURED_STEPS = 2
"""Steps in which all tensors are counted. Later steps use the same memory, except for deferred weight gradients."""


@dataclass
class _Graph:
    """Tensors that a forward keeps for its backward."""

    entered: dict[int, list[torch.Tensor]]
    """Incoming tensors of each value made by another stage."""
    gave: dict[int, list[torch.Tensor]]


@dataclass
class _InFlight:
    """A micro-batch between its arrival and the end of the batch."""

    values: dict[int, Any] = field(default_factory=dict)
    graphs: dict[int, _Graph] = field(default_factory=dict)
    gradients: dict[tuple[int, int], list[torch.Tensor | None]] = field(default_factory=dict)
    """Gradients by value and by the stage that computed them."""
    halves: dict[int, Halves] = field(default_factory=dict)
    """Stages whose weight gradients are deferred."""


@dataclass(frozen=True)
class _Made:
    """A batch, and the state of the random streams after it was made."""

    epoch: int
    position: int
    inputs: Any
    targets: Any
    random: RandomState


class Part:
    """The stages of one trial on one device."""

    def __init__(self, kit: PipelineKit, index: int, device: torch.device, files: SpillFiles, directory: Path) -> None:
        self.kit = kit = replace(kit, program=kit.program.on(device))
        self.index = index
        self.device = device
        self.model: nn.Module = kit.candidate.model
        self.share = DeviceState(kit, index, device, files)
        self.handover = Handover(directory, device)
        self.batches = Batches(kit.candidate, kit.train, training=True, seed=kit.seed)
        self.valid = None if kit.valid is None else Batches(kit.candidate, kit.valid, training=False)
        self.tensors = TensorBytes(self.share.everything())
        self._lanes: dict[int, _InFlight] = {}
        self._ahead: _Made | None = None
        self._measured = 0
        self._judged_epochs = 0
        self._waiting_bytes: int | None = None
        """Bytes that deferred weight gradients keep, or would keep; None before the first such batch."""
        first = kit.program.value_of(0)
        self._maker = {first + op: stage for stage in kit.stages for op in stage.ops}
        self._remote = {value for stage in kit.stages if stage.device != index for value in stage.takes}
        """Values used by stages on other devices."""
        self._evaluation = self.share.random
        """State of the random streams in evaluation."""

    def close(self) -> None:
        """Drop the micro-batches in flight and close the files."""
        self._lanes.clear()
        self.share.files.close()

    def counting(self) -> Any:
        """Return a context that counts tensors in the first steps, and does nothing later."""
        return self.tensors if self._measured < MEASURED_STEPS else _Nothing()

    def counting_judged(self, lane: int) -> Any:
        """Return a context that counts tensors in the first epoch's evaluation, in the first lane.

        Not in mixed precision: while tensors are counted, torch's encoder layers cannot read the dtypes of their
        weights.
        """
        counted = self._judged_epochs == 0 and lane == 0 and not self.kit.program.mixed
        return self.tensors if counted else _Nothing()

    # The batch

    def fetch(self, epoch: int, position: int, count: int, random: Random) -> Fetched:
        """Make a batch and cut it into micro-batches; return the values that other devices need."""
        if random is not None:
            self.share.random = as_state(random)
        made = self._ahead
        if made is None or (made.epoch, made.position) != (epoch, position):
            made = self._make(epoch, position)
        self._ahead, self.share.random = None, made.random
        rows = self.batches.rows_at(position)
        sent = [
            self._admit(lane, some_rows(made.inputs, rows, start, stop), some_rows(made.targets, rows, start, stop))
            for lane, (start, stop) in enumerate(bounds(rows, count))
        ]
        return Fetched(sent, as_random(self.share.random) if self.kit.draws else None)

    def fetch_ahead(self, epoch: int, position: int) -> None:
        """Make the next batch while this device would otherwise wait.

        The random numbers it draws count once `fetch` returns it; after an earlier checkpoint the batch is made again.
        """
        self._ahead = self._make(epoch, position)

    def _make(self, epoch: int, position: int) -> _Made:
        self.share.random.restore(self.device)
        inputs, targets = move(self.batches.fetch(epoch, position), self.device)
        return _Made(epoch, position, inputs, targets, RandomState.capture(self.device))

    def fetch_valid(self, position: int, lane: int, random: Random) -> Fetched:
        """Make a validation batch; its random numbers come from this trial's streams."""
        assert self.valid is not None
        if random is not None:
            self._evaluation = as_state(random)
        elif position == 0:
            self._evaluation = self.share.random
        self._evaluation.restore(self.device)
        inputs, targets = move(self.valid.fetch(0, position), self.device)
        self._evaluation = RandomState.capture(self.device)
        after = as_random(self._evaluation) if random is not None else None
        return Fetched([self._admit(lane, inputs, targets)], after)

    def _admit(self, lane: int, inputs: Any, targets: Any) -> Sent:
        flight = self._lanes[lane] = _InFlight()
        flight.values = {**dict(enumerate(self.kit.program.bind(inputs))), TARGETS: targets}
        wanted: set[int] = set()
        for stage in self.kit.stages:
            if stage.device != self.index:
                wanted.update(value for value in self._takes(stage) if value in flight.values)
        return {value: self.handover.send(f"x{value}-{lane}", flight.values[value]) for value in sorted(wanted)}

    def _takes(self, stage: Stage) -> tuple[int, ...]:
        return (*stage.takes, TARGETS) if stage.loss else stage.takes

    # Training

    def forward(
        self, stage: Stage, lane: int, arrived: Sent, weight: float, random: Random, *, in_halves: bool
    ) -> Forwarded:
        """Run a stage's forward for a micro-batch; the stage with the loss also runs its backward.

        With `in_halves` the gradients of its weights are deferred to `weights`, if memory allows.
        """
        flight = self._arrive(lane, arrived)
        self._mode(training=True)
        if random is not None:
            as_state(random).restore(self.device)
        first = self.kit.program.value_of(0)
        values, entered = {}, {}
        for value in stage.takes:
            leaves: list[torch.Tensor] = []
            values[value] = tree_map(
                lambda leaf, v=value, into=leaves: self._enter(leaf, v, into), flight.values[value]
            )
            if value >= first:
                entered[value] = leaves
        keep = {*stage.gives, *(self.kit.program.results if stage.loss else ())}
        # If no incoming tensor needs a gradient, no device waits for one.
        waited_for = in_halves and any(leaf.requires_grad for leaves in entered.values() for leaf in leaves)
        split = flight.halves[stage.index] = self._halves(stage) if waited_for else Halves({}, waits=False)
        self.kit.program.run_some(self.model, values, stage.ops, keep, training=True, instead=split.instead)
        if waited_for:
            self._waiting_bytes = max(self._waiting_bytes or 0, split.bytes)
        graph = _Graph(entered, {value: _tensors(values[value]) for value in stage.gives})
        if stage.loss:
            loss = self._loss(values, flight.values[TARGETS], weight)
            return Forwarded(self._pass_back(stage, lane, graph), self._after(random), loss)
        flight.graphs[stage.index] = graph
        flight.values |= {value: values[value] for value in stage.gives}
        return Forwarded(self._hand_on(stage, lane), self._after(random))

    def _after(self, random: Random) -> Random:
        """Return the state of the random streams, for the next stage."""
        return as_random(RandomState.capture(self.device)) if random is not None else None

    def _loss(self, values: Mapping[int, Any], targets: Any, weight: float) -> float:
        candidate = self.kit.candidate
        loss = batch_loss(candidate, self.kit.program.outputs(values), targets)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise Diverged("the training loss", value, self.share.steps)
        weighted = loss if weight == 1.0 else loss * weight
        (weighted / candidate.accumulate).backward()  # type: ignore[no-untyped-call]
        return value

    def _halves(self, stage: Stage) -> Halves:
        """Defer the weight gradients of the stage's layers if memory allows, judging by the measured steps."""
        program = self.kit.program
        layers = {op: self.model.get_submodule(str(program.training[op].target)) for op in stage.later}
        room = self.kit.capacity[self.index] - self.tensors.peak - stage.peak_bytes
        kept = self._waiting_bytes
        waits = self._measured >= MEASURED_STEPS and kept is not None and kept <= room and not program.mixed
        return Halves({op: module for op, module in layers.items() if is_plain(module)}, waits=waits)

    def weights(self, stage: Stage, lane: int) -> None:
        """Compute the deferred weight gradients of a stage."""
        self._lanes[lane].halves.pop(stage.index).second()

    def backward(self, stage: Stage, lane: int, arrived: Sequence[tuple[int, Sent]]) -> Sent:
        """Run a stage's backward for a micro-batch; `arrived` has gradients with the stages that computed them."""
        flight = self._lanes[lane]
        for user, sent in arrived:
            for value, places in sent.items():
                # Clone: autograd may keep a gradient it is given, and the next batch overwrites this place.
                flight.gradients[value, user] = [_copy(each) for each in self.handover.receive(places)]
        graph = flight.graphs.pop(stage.index)
        roots: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for value, tensors in graph.gave.items():
            from_users = [flight.gradients.pop(key) for key in sorted(flight.gradients) if key[0] == value]
            for i, tensor in enumerate(tensors):
                given = [gradient for each in from_users if (gradient := each[i]) is not None]
                if given:
                    roots.append(tensor)
                    gradients.append(sum(given[1:], given[0]))
            flight.values.pop(value, None)
        if roots:
            torch.autograd.backward(roots, gradients)
        return self._pass_back(stage, lane, graph)

    def step(self, factor: float) -> None:
        """Run the optimizer's step for the parameters on this device, with gradients scaled by `factor`."""
        with self.counting():
            self.share.step(factor)
        self._measured += 1

    def end_batch(self) -> None:
        """Drop the values and graphs of the batch."""
        self._lanes.clear()

    # Epochs

    def judge(self, stage: Stage, lane: int, arrived: Sent, random: Random) -> Evaluated:
        """Run a stage's forward in evaluation; the stage with the loss returns the metrics of the batch."""
        flight = self._arrive(lane, arrived)
        self._mode(training=False)
        if random is not None:
            as_state(random).restore(self.device)
        keep = {*stage.gives, *(self.kit.program.results if stage.loss else ())}
        values = {value: flight.values[value] for value in stage.takes}
        with torch.no_grad():
            self.kit.program.run_some(self.model, values, stage.ops, keep, training=False)
            if not stage.loss:
                flight.values |= {value: values[value] for value in stage.gives}
                return Evaluated(self._hand_on(stage, lane), self._after(random), {})
            candidate, outputs = self.kit.candidate, self.kit.program.outputs(values)
            targets = flight.values[TARGETS]
            judged = {"loss": float(candidate.loss(outputs, targets))}
            for name, metric in candidate.metrics.items():
                judged[name] = as_number(metric(outputs, targets), f"metric {name!r}")
            return Evaluated({}, self._after(random), judged)

    def end_epoch(self, loss: float) -> None:
        """End the epoch, whose evaluation gave this loss."""
        self._lanes.clear()
        self._judged_epochs += 1
        self.share.end_epoch(loss)

    # Values

    def _arrive(self, lane: int, arrived: Sent) -> _InFlight:
        flight = self._lanes.setdefault(lane, _InFlight())
        for value, places in arrived.items():
            flight.values[value] = self.handover.receive(places)
        return flight

    def _enter(self, leaf: Any, value: int, into: list[torch.Tensor]) -> Any:
        """Return a tensor as a leaf for this stage, detached from the graph of the stage that made it."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        inside = leaf.detach().requires_grad_(leaf.requires_grad)
        into.append(inside)
        return inside.clone() if value in self.kit.program.mutated else inside

    def _hand_on(self, stage: Stage, lane: int) -> Sent:
        """Send the values that stages on other devices use."""
        values = self._lanes[lane].values
        return {v: self.handover.send(f"x{v}-{lane}", values[v]) for v in stage.gives if v in self._remote}

    def _pass_back(self, stage: Stage, lane: int, graph: _Graph) -> Sent:
        """Keep the gradients of incoming values for stages on this device, and send the others."""
        flight, sent = self._lanes[lane], {}
        for value, tensors in graph.entered.items():
            gradients = [tensor.grad for tensor in tensors]
            if self._maker[value].device == self.index:
                flight.gradients[value, stage.index] = gradients
            else:
                sent[value] = self.handover.send(f"d{value}-{stage.index}-{lane}", gradients)
                flight.values.pop(value, None)
        return sent

    def _mode(self, *, training: bool) -> None:
        if getattr(self, "_training", None) is not training:
            self.model.train(training)
            self._training = training


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_exc: object) -> None: ...


def _copy(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient.clone()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
