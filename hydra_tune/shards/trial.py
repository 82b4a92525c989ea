"""A candidate in training, in shards: the plain loop of `training.Training`, with one shard on the device at a time.

Now and then it commits: all changed blocks and the logbook go to the trial's files, and any worker can take the trial
up from there. Until the next commit the files keep that state whole.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hydra_tune.batches import Batches, move
from hydra_tune.candidate import Candidate, Dataset
from hydra_tune.engine.device_memory import DeviceMemory
from hydra_tune.engine.spill import SpillFiles
from hydra_tune.engine.unit import StepRecord
from hydra_tune.graph.profile import bytes_of
from hydra_tune.graph.program import Program, program_inputs
from hydra_tune.seeds import RandomState
from hydra_tune.shards.logbook import Logbook
from hydra_tune.shards.optimizers import OptimizerParts, Schedule
from hydra_tune.shards.plan import Bundle, Plan, Shard
from hydra_tune.shards.runner import TARGETS, ShardRunner, Step
from hydra_tune.shards.steps import Steps
from hydra_tune.training import Diverged, Progress, as_number

COMMIT_SHARE = 0.01
"""Of training, for commits: those of a trial that is on the device as a whole take longer, and come less often."""
COMMIT_BYTES_PER_SECOND = 1e9
"""For the first one, which writes to fresh pages."""


@dataclass(frozen=True)
class Kit:
    """What every worker that trains a trial gets: the candidate with an empty model, its data and its plan."""

    candidate: Candidate
    train: Dataset
    valid: Dataset | None
    seed: int
    program: Program
    plan: Plan
    parts: OptimizerParts
    recompute: frozenset[int]
    """Shards whose activations are cheaper to compute again than to spill."""
    between_steps: bool = False
    """Whether training pauses between steps only: there is no place for gradients that wait for one."""


@dataclass(frozen=True)
class At:
    """Which batch a trial is at: of its training data, or of its validation data."""

    epoch: int
    batch: int
    judging: bool = False


class ShardedTrial:
    """One trial in one worker."""

    def __init__(self, kit: Kit, memory: DeviceMemory, files: SpillFiles, kit_file: str = "") -> None:
        self.kit = kit
        self.kit_file = kit_file
        """Where the kit came from: another cut of the trial has another one."""
        self.candidate = kit.candidate
        self.memory = memory
        self.files = files
        self.batches = Batches(kit.candidate, kit.train, training=True, seed=kit.seed)
        self.valid = None if kit.valid is None else Batches(kit.candidate, kit.valid, training=False)
        self.records: list[StepRecord] = []
        self.on_step: Callable[[], None] = lambda: None
        """Called after each step: a sign of life."""
        self.at = At(0, 0)
        self.committed = True
        """Whether all that was trained is committed; else it is here only."""
        self._trained_since = 0.0
        """Seconds of training that the last commit does not have."""
        self._commit_seconds = min(kit.plan.state_bytes, memory.budget) / COMMIT_BYTES_PER_SECOND
        self._norms: dict[str, torch.Tensor] = {}
        self.runner = ShardRunner(kit.candidate.model, kit.program, kit.plan, memory, files, self._on_gradient)
        self._parameters = dict(kit.candidate.model.named_parameters())
        self.steps = Steps(self._parameters, kit.parts, memory.device, kit.program.mixed)
        self.take_up()

    def take_up(self) -> None:
        """Go on from the last commit, whoever made it; blocks that are here and still current stay."""
        self.files.reload()
        self.memory.forget(self.files, outdated_only=True)
        self.logbook = Logbook.from_json(self.files.notes)
        self.committed = True
        self.schedule = Schedule(self.kit.parts, self.candidate.scheduler, self.logbook.schedule, self.logbook.groups)
        self.runner.version = max((stored.version for stored in self.files.committed.values()), default=0)

    def close(self) -> None:
        """Free what this trial has on the device."""
        self.memory.forget(self.files)
        self.files.close()

    def commit(self) -> None:
        """Make this the state that survives, and that another worker can take up."""
        began = time.perf_counter()
        self.logbook.schedule, self.logbook.groups = self.schedule.state(), list(self.schedule.options)
        self.logbook.commits += 1
        self.memory.flush(self.files)
        self.files.commit(self.logbook.as_json())
        self.committed = True
        self._trained_since = 0.0
        self._commit_seconds = time.perf_counter() - began

    def _commit_is_due(self) -> bool:
        """Where much is on the device and stays there, writing all of it is not worth it every time."""
        return self._trained_since > self._commit_seconds / COMMIT_SHARE

    # Training

    def train_for(self, seconds: float) -> Progress:
        """Train until the time is up or the epoch ends, at least one batch, and commit where that is due."""
        logbook, began = self.logbook, time.perf_counter()
        first = logbook.batch
        self.memory.running = self.files
        self.candidate.model.train()
        self._restore_random()
        while logbook.batch < len(self.batches):
            self._train_batch()
            if time.perf_counter() - began >= seconds and self._may_pause():
                break
        logbook.random = RandomState.capture(self.memory.device).state()
        self.committed = False
        self._trained_since += time.perf_counter() - began
        if self._commit_is_due():
            self._timed("commit", 0, self.commit)
        return Progress(
            epoch=logbook.epoch, batch=logbook.batch, batches=len(self.batches), steps=logbook.steps,
            loss=logbook.loss_sum / max(logbook.loss_rows, 1), batches_done=logbook.batch - first,
            seconds=time.perf_counter() - began,
        )  # fmt: skip

    def _may_pause(self) -> bool:
        return not self.kit.between_steps or self.logbook.batch % self.candidate.accumulate == 0

    def _restore_random(self) -> None:
        state = RandomState.from_state(self.logbook.random)
        if state.device_state is None and self.memory.device.type != "cpu":
            # The trial was cut where there is no accelerator; a plain loop seeds that too.
            torch.get_device_module(self.memory.device).manual_seed(self.kit.seed)
        state.restore(self.memory.device)

    def _train_batch(self) -> None:
        *before, last = self.kit.plan.shards
        self._fetch(self.batches, self.logbook.epoch, self.logbook.batch)
        stepping = self._step_is_due()
        for shard in before:
            keep = shard.index not in self.kit.recompute
            self._timed("forward", shard.index, self.runner.forward, shard, keep)
        self._timed("forward-backward", last.index, self._forward_backward, last, stepping)
        for shard in reversed(before):
            self._timed("backward", shard.index, self._backward, shard, stepping)
        if stepping:
            self._finish_step()
        self.runner.end_batch()
        self.logbook.batch += 1

    def _fetch(self, batches: Batches, epoch: int, position: int) -> None:
        """Make a batch, and keep its inputs and targets as values."""
        self.at = At(epoch, position, judging=batches is self.valid)
        inputs, targets = move(batches.fetch(epoch, position), self.memory.device)
        self.kit.program.check(program_inputs(inputs))
        due, bound = self.runner.due("x/", 0), self.kit.program.bind(inputs)
        self.runner.scale = max(1.0, bytes_of(bound) / max(1, self.kit.plan.shards[0].cost.in_bytes))
        for value, tree in enumerate(bound):
            self.runner.values.put(value, tree, due)
        self.runner.values.put(TARGETS, targets, due)

    def _step_is_due(self) -> bool:
        done = self.logbook.batch + 1
        return done % self.candidate.accumulate == 0 or done == len(self.batches)

    def _forward_backward(self, shard: Shard, stepping: bool) -> None:
        def loss(outputs: Any, targets: Any) -> torch.Tensor:
            total = self.candidate.loss(outputs, targets)
            value = float(total.detach())
            if not math.isfinite(value):
                raise Diverged("the training loss", value, self.logbook.steps)
            rows = self.batches.rows_at(self.logbook.batch)
            self.logbook.loss_sum += value * rows
            self.logbook.loss_rows += rows
            return total / self.candidate.accumulate

        self.runner.forward_loss(
            shard, loss, lambda step: self._prepare(step, shard), lambda step: self._finish(step, shard, stepping)
        )  # fmt: skip

    def _backward(self, shard: Shard, stepping: bool) -> None:
        self.runner.backward(
            shard, lambda step: self._prepare(step, shard), lambda step: self._finish(step, shard, stepping)
        )  # fmt: skip

    def _steps_here(self, bundle: Bundle, shard: Shard) -> bool:
        """Whether this shard's backward makes the step of a bundle: all its gradients are there by then."""
        return not self.kit.plan.deferred and bundle.owner == shard.index

    def _prepare(self, step: Step, shard: Shard) -> None:
        for bundle in shard.bundles:
            self.steps.bring_index(step, bundle)
            if not self._steps_here(bundle, shard) or len(bundle.users) > 1:
                self.steps.bring_gradients(self.runner, step, bundle)
            if self._steps_here(bundle, shard):
                self.steps.bring_optimizer(step, bundle)

    def _finish(self, step: Step, shard: Shard, stepping: bool) -> None:
        for bundle in shard.bundles:
            if self._steps_here(bundle, shard):
                for name in bundle.parameters:
                    if name in self.logbook.touched and name not in self.steps.done:
                        self._step_parameter(name)
                self._let_go_of_gradients(step, bundle)
            elif stepping and self.candidate.clip_grad_norm is not None and bundle.owner == shard.index:
                for name in bundle.parameters:
                    if name in self.logbook.touched:
                        self._norms[name] = torch.linalg.vector_norm(self.steps.gradient(name))
        self.steps.let_go()

    def _let_go_of_gradients(self, step: Step, bundle: Bundle) -> None:
        waiting = self._wait_for_ever(bundle)
        self.logbook.touched.difference_update(set(bundle.parameters) - waiting)
        for name in bundle.parameters:
            self._parameters[name].grad = None
        key = f"g/{bundle.name}"
        if waiting:
            for name, gradient in bundle.gradients.views(step.hold(key)).items():
                if name not in waiting:
                    gradient.zero_()
        elif key in step.held:
            step.drop(key)

    def _wait_for_ever(self, bundle: Bundle) -> set[str]:
        """Parameters that the optimizer was not given: nobody zeroes their gradients, and clipping counts them."""
        if self.candidate.clip_grad_norm is None:
            return set()
        return {n for n in bundle.parameters if n in self.logbook.touched and n not in self.kit.parts.group_of}

    def _finish_step(self) -> None:
        """After the last backward: the deferred steps, then the schedule."""
        if self.kit.plan.deferred:
            factor = self._clip_factor()
            for shard in self.kit.plan.shards:
                self._timed("step", shard.index, self._step_shard, shard, factor)
        self.logbook.steps += 1
        if self.candidate.schedule_every == "step":
            self.schedule.step()

    def _clip_factor(self) -> float | torch.Tensor:
        """As `clip_grad_norm_` computes it, from the norms of all gradients."""
        limit = self.candidate.clip_grad_norm
        norms = [self._norms[name] for name in self._parameters if name in self._norms]
        self._norms.clear()
        if limit is None or not norms:
            return 1.0
        total = torch.linalg.vector_norm(torch.stack(norms))
        return torch.clamp(limit / (total + 1e-6), max=1.0)

    def _step_shard(self, shard: Shard, factor: float | torch.Tensor | None) -> None:
        factor = None if self.candidate.clip_grad_norm is None else factor
        position, reserve = self.runner.step_position(shard.index), self.runner.step_reserve(shard)
        with self.runner.step(shard, position, reserve) as step:
            for bundle in shard.bundles:
                if bundle.owner != shard.index or self.logbook.touched.isdisjoint(bundle.parameters):
                    continue
                self.steps.bring_index(step, bundle)
                self.steps.bring_gradients(self.runner, step, bundle)
                self.steps.bring_optimizer(step, bundle)
                for name in bundle.parameters:
                    if name in self.logbook.touched:
                        self._step_parameter(name, factor)
                self._let_go_of_gradients(step, bundle)
        self.steps.let_go()

    def _on_gradient(self, name: str, parameter: nn.Parameter) -> None:
        """Autograd has finished a parameter's gradient: make its step at once, or leave it for later."""
        self.steps.gather(name)
        if name in self.steps.ready and not self.runner.still_needed(name):
            self._step_parameter(name)
        else:
            self.logbook.touched.add(name)

    def _step_parameter(self, name: str, factor: float | torch.Tensor | None = None) -> None:
        """One parameter's optimizer step; its gradient is used up."""
        if name not in self.steps.ready:  # the optimizer was not given it; clipping counts its gradient all the same
            if factor is not None:
                self.steps.gradient(name).mul_(factor)
            self.steps.done.add(name)
            self._parameters[name].grad = None
            return
        options = self.schedule.options[self.kit.parts.group_of[name]]
        self.logbook.started[name] = self.steps.make(name, options, self.logbook.started.get(name), factor)

    # Evaluation and epochs

    def end_epoch(self, epoch: int | None = None) -> dict[str, float]:
        """Judge the epoch, step an epoch schedule, go to the next epoch, and commit.

        An `epoch` that is behind has been judged by a worker which ended before it could say so; what a lost worker had
        trained of this one since the last commit is trained again.
        """
        logbook = self.logbook
        if epoch is not None and epoch < logbook.epoch:
            return logbook.history[epoch]
        if logbook.batch < len(self.batches):
            self.train_for(math.inf)
        train_loss = logbook.loss_sum / max(logbook.loss_rows, 1)
        judged = {"train_loss": train_loss, **(self._evaluate() or {"loss": train_loss})}
        if self.candidate.schedule_every == "epoch":
            self.schedule.step(judged["loss"])
        logbook.epoch, logbook.batch = logbook.epoch + 1, 0
        logbook.loss_sum, logbook.loss_rows = 0.0, 0
        logbook.history.append(judged)
        self.commit()
        return judged

    def _evaluate(self) -> dict[str, float]:
        if self.valid is None:
            return {}
        sums: dict[str, float] = {}
        self.memory.running = self.files
        self.candidate.model.eval()
        before = RandomState.capture(self.memory.device)
        self._restore_random()
        for position in range(len(self.valid)):
            self._fetch(self.valid, 0, position)
            rows = self.valid.rows_at(position)

            def judge(outputs: Any, targets: Any, rows: int = rows) -> None:
                judged = {"loss": float(self.candidate.loss(outputs, targets))}
                for name, metric in self.candidate.metrics.items():
                    judged[name] = as_number(metric(outputs, targets), f"metric {name!r}")
                for name, value in judged.items():
                    sums[name] = sums.get(name, 0.0) + value * rows

            for shard in self.kit.plan.shards:
                self._timed("evaluate", shard.index, self.runner.evaluate, shard, judge)
            self.runner.end_batch()
        before.restore(self.memory.device)
        means = {name: total / self.valid.rows for name, total in sums.items()}
        if not math.isfinite(means["loss"]):
            raise Diverged("the validation loss", means["loss"], self.logbook.steps)
        return means

    def keep_weights(self) -> None:
        """Remember the weights as they are now, for a candidate that keeps its best epoch."""
        for key in list(self.files.committed):
            if key.startswith(("w/", "b/", "i/", "m/")):
                self.files.copy(key, f"k/{key}")
        self.logbook.kept = True
        self.commit()

    def _timed(self, kind: str, shard: int, work: Callable[..., None], *args: Any) -> None:
        started, clock = time.time(), time.perf_counter()
        read, written = self.files.read_bytes, self.files.written_bytes
        work(*args)
        self.on_step()
        self.records.append(
            StepRecord(
                kind, shard, started, time.perf_counter() - clock, self.files.read_bytes - read,
                self.files.written_bytes - written,
            )
        )  # fmt: skip
