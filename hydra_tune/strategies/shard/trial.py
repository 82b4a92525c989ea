"""A candidate in training, in shards: the plain loop of `training.Training`, with one shard on the device at a time.

Now and then it commits: all changed blocks and the logbook go to the trial's files, and any worker can take the trial
up from there. Until the next commit the files keep that state whole.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hydra_tune.core.errors import CandidateError
from hydra_tune.core.metric_value import as_number
from hydra_tune.core.random_state import RandomState
from hydra_tune.core.trees import call_model, move
from hydra_tune.engine.unit import StepRecord
from hydra_tune.graph.pilot_steps import bytes_of
from hydra_tune.graph.program import HALF, in_full
from hydra_tune.spill.device_memory import DeviceMemory
from hydra_tune.spill.store import SpillFiles
from hydra_tune.strategies.shard.buffers import Buffers
from hydra_tune.strategies.shard.cut import At
from hydra_tune.strategies.shard.first_batch import Comparison
from hydra_tune.strategies.shard.held_blocks import HeldBlocks
from hydra_tune.strategies.shard.kit import Kit
from hydra_tune.strategies.shard.logbook import Logbook
from hydra_tune.strategies.shard.module_state import ModuleState
from hydra_tune.strategies.shard.optimizer_steps import OptimizerSteps
from hydra_tune.strategies.shard.optimizers import Schedule
from hydra_tune.strategies.shard.plan import Bundle, PlannedShard
from hydra_tune.strategies.shard.runner import ShardRunner
from hydra_tune.training.batches import Batches
from hydra_tune.training.candidate import batch_loss
from hydra_tune.training.progress import Diverged, Progress

COMMIT_SHARE = 0.01
"""Largest share of training time spent on commits."""
COMMIT_BYTES_PER_SECOND = 1e9
"""Bytes per second assumed for the first commit, which writes to fresh pages."""


class ShardedTrial:
    """Trains one trial in one worker, shard by shard."""

    def __init__(self, kit: Kit, memory: DeviceMemory, files: SpillFiles, kit_file: str = "") -> None:
        self.kit = kit
        self.kit_file = kit_file
        """Path of the kit's file; each cut of the trial has another one."""
        self.candidate = kit.candidate
        self.memory = memory
        self.files = files
        self.batches = Batches(kit.candidate, kit.train, training=True, seed=kit.seed)
        self.valid = None if kit.valid is None else Batches(kit.candidate, kit.valid, training=False)
        self.records: list[StepRecord] = []
        self.on_step: Callable[[], None] = lambda: None
        """Callback after each step, as a sign of life."""
        self.at = At(0, 0)
        self.committed = True
        """True if all training so far is committed; else some of it is in this worker only."""
        self._trained_since = 0.0
        """Seconds of training since the last commit."""
        self._commit_seconds = min(kit.plan.state_bytes, memory.budget) / COMMIT_BYTES_PER_SECOND
        self._norms: dict[str, torch.Tensor] = {}
        self.model = kit.candidate.model
        self.runner = ShardRunner(
            self.model, kit.plan, memory, files, self._on_gradient, self._on_shard, self._keep_only
        )
        self._parameters = dict(self.model.named_parameters())
        self.steps = OptimizerSteps(self._parameters, kit.parts, memory.device, kit.mixed)
        self._frozen = {name for name, parameter in self._parameters.items() if not parameter.requires_grad}
        self.modules = ModuleState(self.model)
        self.buffers = Buffers(self.model, kit.plan.buffers, files)
        self._began = (time.time(), time.perf_counter(), 0, 0)
        """Time at which the present shard was entered (clock and counter), and the bytes read and written by then."""
        self._clipping = False
        self._comparison: Comparison | None = None
        """Set while the first batch is trained, if it can be compared with the whole model's."""
        self.take_up()

    def take_up(self) -> None:
        """Continue from the last commit, by whichever worker; blocks that are here and still current stay."""
        self.files.reload()
        self.memory.forget(self.files, outdated_only=True)
        self.logbook = Logbook.from_json(self.files.notes)
        self.committed = True
        self.schedule = Schedule(self.kit.parts, self.candidate.scheduler, self.logbook.schedule, self.logbook.groups)
        self.runner.version = max((stored.version for stored in self.files.committed.values()), default=0)
        self.buffers.load()
        self.modules.restore(self.logbook.attributes, self.logbook.extra)
        self._norms.clear()

    def close(self) -> None:
        """Free the device memory of this trial."""
        self.memory.forget(self.files)
        self.files.close()

    def commit(self) -> None:
        """Commit the present state: it survives a loss, and another worker can take it up."""
        began = time.perf_counter()
        self.logbook.schedule, self.logbook.groups = self.schedule.state(), list(self.schedule.options)
        self.logbook.attributes, self.logbook.extra = self.modules.changed(), self.modules.extra()
        self.logbook.commits += 1
        self.memory.flush(self.files)
        self.buffers.store(self.runner.next_version())
        self.files.commit(self.logbook.as_json())
        self.committed = True
        self._trained_since = 0.0
        self._commit_seconds = time.perf_counter() - began

    def _commit_is_due(self) -> bool:
        """True if training since the last commit took long enough for another at `COMMIT_SHARE` of the time."""
        return self._trained_since > self._commit_seconds / COMMIT_SHARE

    # Training

    def train_for(self, seconds: float) -> Progress:
        """Train until the time is up or the epoch ends, at least one batch, and commit if that is due."""
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
            self._mark()
            self.commit()
            self._on_shard("commit", 0)
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
        inputs, targets = self._fetch(self.batches, self.logbook.epoch, self.logbook.batch)
        self._mark()
        if self.kit.first is not None and (self.logbook.epoch, self.logbook.batch) == (0, 0):
            self._comparison = Comparison(self.kit.first)
        stepping = self._step_is_due()
        self._clipping = stepping and self.candidate.clip_grad_norm is not None
        with self.runner.running("forward"):
            total = self._loss(self._forward(inputs), targets)
        del inputs, targets
        self.runner.backward(total)
        del total
        if self._comparison is not None:
            self._comparison.check({name: p.dtype for name, p in self._parameters.items()})
            self._comparison = None
        if not self.kit.plan.deferred:
            self._step_the_rest()
        elif stepping:
            factor = self._clip_factor()
            for shard in self.kit.plan.shards:
                self._step_shard(shard, "step", factor)
        if stepping:
            self.logbook.steps += 1
            if self.candidate.schedule_every == "step":
                self.schedule.step()
        self.runner.end_batch()
        self.logbook.batch += 1

    def _fetch(self, batches: Batches, epoch: int, position: int) -> tuple[Any, Any]:
        """Return a batch's inputs and targets, on the device."""
        self.at = At(epoch, position, judging=batches is self.valid)
        inputs, targets = move(batches.fetch(epoch, position), self.memory.device)
        self.runner.scale = max(1.0, bytes_of((inputs, targets)) / max(1, self.kit.plan.batch_bytes))
        return inputs, targets

    def _forward(self, inputs: Any) -> Any:
        if not self.kit.mixed:
            return call_model(self.model, inputs)
        with torch.autocast(self.memory.device.type, dtype=HALF):
            return in_full(call_model(self.model, inputs))

    def _step_is_due(self) -> bool:
        done = self.logbook.batch + 1
        return done % self.candidate.accumulate == 0 or done == len(self.batches)

    def _loss(self, outputs: Any, targets: Any) -> torch.Tensor:
        total = batch_loss(self.candidate, outputs, targets)
        value = float(total.detach())
        if not math.isfinite(value):
            raise Diverged("the training loss", value, self.logbook.steps)
        if self._comparison is not None:
            self._comparison.loss = value
        rows = self.batches.rows_at(self.logbook.batch)
        self.logbook.loss_sum += value * rows
        self.logbook.loss_rows += rows
        divided: torch.Tensor = total / self.candidate.accumulate
        return divided

    # Gradients and steps

    def _on_gradient(self, name: str, parameter: nn.Parameter) -> None:
        """Make a parameter's step as soon as its gradient is finished, or add the gradient to its block to wait."""
        if name in self._frozen:
            raise CandidateError(
                f"parameter {name!r} was frozen when the trial began, and is trained now", "use strategy whole"
            )
        if self._comparison is not None and parameter.grad is not None:
            self._comparison.add_gradient(name, parameter.grad)
        trained = name in self.kit.parts.group_of
        if not trained and self.candidate.clip_grad_norm is None:
            parameter.grad = None  # nobody will ever look at it
            return
        held, bundle = self.runner.gradient_of(name), self.runner.bundle_of(name)
        self.steps.bring_index(held, bundle)
        if trained and not self.kit.plan.deferred and not self.runner.still_needed(name):
            self.steps.bring_optimizer(held, bundle)
            self._step_parameter(name)
            return
        self.steps.gather(name, self.runner.gradients(bundle)[name])
        self.logbook.touched.add(name)
        if self._clipping:
            self._norms[name] = self._norm(name, bundle)

    def _norm(self, name: str, bundle: Bundle) -> torch.Tensor:
        found: torch.Tensor = torch.linalg.vector_norm(self.steps.waiting(name, self.runner.gradients(bundle)[name]))
        return found

    def _step_the_rest(self) -> None:
        """Make the steps of parameters that the backward still needed when their gradients were finished."""
        if not self.logbook.touched:
            return
        for shard in reversed(self.kit.plan.shards):
            self._step_shard(shard, "backward", None)

    def _step_shard(self, shard: PlannedShard, kind: str, factor: float | torch.Tensor | None) -> None:
        """Make the waiting steps of the parameters that this shard owns."""
        for bundle in self.kit.plan.owned_by(shard):
            if self.logbook.touched.isdisjoint(bundle.parameters):
                continue
            held = self.runner.enter(kind, shard.index)
            self.runner.attach(bundle.parameters[0])
            self.steps.bring_index(held, bundle)
            self.steps.bring_optimizer(held, bundle)
            self.steps.bring_gradients(self.runner, bundle)
            for name in bundle.parameters:
                if name in self.logbook.touched:
                    self._step_parameter(name, factor)
            self._let_go_of_gradients(held, bundle)

    def _let_go_of_gradients(self, held: HeldBlocks, bundle: Bundle) -> None:
        waiting = self._wait_for_ever(bundle)
        self.logbook.touched.difference_update(set(bundle.parameters) - waiting)
        for name in bundle.parameters:
            self._parameters[name].grad = None
        if not waiting:
            held.drop(f"g/{bundle.name}")
            return
        for name, gradient in self.runner.gradients(bundle).items():
            if name not in waiting:
                gradient.zero_()

    def _wait_for_ever(self, bundle: Bundle) -> set[str]:
        """Return parameters that the optimizer was not given: clipping counts their gradients, which nothing zeroes."""
        if self.candidate.clip_grad_norm is None:
            return set()
        return {n for n in bundle.parameters if n in self.logbook.touched and n not in self.kit.parts.group_of}

    def _clip_factor(self) -> float | torch.Tensor | None:
        """Return the factor that `clip_grad_norm_` computes from the norms of all gradients; None without clipping."""
        limit = self.candidate.clip_grad_norm
        if limit is None:
            return None
        for shard in self.kit.plan.shards:
            self._find_missing_norms(shard)
        norms = [self._norms[name] for name in self._parameters if name in self._norms]
        self._norms.clear()
        if not norms:
            return 1.0
        total = torch.linalg.vector_norm(torch.stack(norms))
        return torch.clamp(limit / (total + 1e-6), max=1.0)

    def _find_missing_norms(self, shard: PlannedShard) -> None:
        """Compute norms of gradients that came in earlier batches and were not added to in this one."""
        for bundle in self.kit.plan.owned_by(shard):
            missing = [n for n in bundle.parameters if n in self.logbook.touched and n not in self._norms]
            if missing:
                self.steps.bring_index(self.runner.enter("step", shard.index), bundle)
                self._norms |= {name: self._norm(name, bundle) for name in missing}

    def _step_parameter(self, name: str, factor: float | torch.Tensor | None = None) -> None:
        """Make one parameter's optimizer step; its gradient is used up."""
        if name not in self.steps.ready:  # the optimizer was not given it; clipping counts its gradient all the same
            if factor is not None:
                self.steps.gradient(name).mul_(factor)
            self._parameters[name].grad = None
            return
        options = self.schedule.options[self.kit.parts.group_of[name]]
        self.logbook.started[name] = self.steps.make(name, options, self.logbook.started.get(name), factor)

    # Evaluation and epochs

    def end_epoch(self, epoch: int | None = None) -> dict[str, float]:
        """Evaluate the epoch, step an epoch schedule, go to the next epoch, and commit; return the metrics.

        If `epoch` is already over, because a worker evaluated it and was lost before it could answer, return its
        recorded metrics. Batches of this epoch that a lost worker had trained since the last commit are trained again.
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

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        if self.valid is None:
            return {}
        sums: dict[str, float] = {}
        self.memory.running = self.files
        self.model.eval()
        before = RandomState.capture(self.memory.device)
        self._restore_random()
        for position in range(len(self.valid)):
            inputs, targets = self._fetch(self.valid, 0, position)
            self._mark()
            with self.runner.running("evaluate"):
                judged = self._judged(self._forward(inputs), targets)
            self.runner.end_batch()
            for name, value in judged.items():
                sums[name] = sums.get(name, 0.0) + value * self.valid.rows_at(position)
        before.restore(self.memory.device)
        means = {name: total / self.valid.rows for name, total in sums.items()}
        if not math.isfinite(means["loss"]):
            raise Diverged("the validation loss", means["loss"], self.logbook.steps)
        return means

    def _judged(self, outputs: Any, targets: Any) -> dict[str, float]:
        judged = {"loss": float(self.candidate.loss(outputs, targets))}
        for name, metric in self.candidate.metrics.items():
            judged[name] = as_number(metric(outputs, targets), f"metric {name!r}")
        return judged

    def keep_weights(self) -> None:
        """Keep the present weights as those of the best epoch so far."""
        for key in list(self.files.committed):
            if key.startswith(("w/", "b/", "i/", "m/")):
                self.files.copy(key, f"k/{key}")
        self.logbook.kept = True
        self.commit()

    def _keep_only(self, names: set[str]) -> None:
        """Forget the blocks of all parameters but these, which the runner has released."""
        self.steps.let_go(names)

    # Records

    def _mark(self) -> None:
        """Note the time and the bytes moved at the beginning of a shard's part of a batch."""
        self._began = (time.time(), time.perf_counter(), self.files.read_bytes, self.files.written_bytes)

    def _on_shard(self, kind: str, shard: int) -> None:
        """Record a shard's finished part of a batch."""
        self.steps.let_go()
        self.on_step()
        started, clock, read, written = self._began
        self.records.append(
            StepRecord(
                kind, shard, started, time.perf_counter() - clock, self.files.read_bytes - read,
                self.files.written_bytes - written,
            )
        )  # fmt: skip
        self._mark()
