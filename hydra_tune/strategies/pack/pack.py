"""A pack: several candidates of one signature trained as one batched model, in one process.

Every member has its own weights, optimizer state, data order, random stream and schedule, and ends as if trained alone,
up to rounding. A member whose loss is not finite, or whose own code raises, leaves; the others do not notice.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map

from hydra_tune.core.random_state import RandomState
from hydra_tune.core.tensor_memory import TensorBytes
from hydra_tune.core.trees import move
from hydra_tune.strategies.pack.batched_model import BatchedModel
from hydra_tune.strategies.pack.batches import share_data, stacked, stacked_rows
from hydra_tune.strategies.pack.comparison import COMPARED, comparison
from hydra_tune.strategies.pack.member import Member
from hydra_tune.strategies.pack.optimizers import kind_of
from hydra_tune.strategies.pack.refusal import CannotPack, reason
from hydra_tune.strategies.pack.stack import Stack
from hydra_tune.strategies.pack.streams import Held, Streams
from hydra_tune.training.loop import MEASURED_STEPS
from hydra_tune.training.progress import Diverged, Progress

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Pack:
    """Members of one signature at the same batch of their epochs."""

    def __init__(self, members: Sequence[Member], *, compared: set[Any] | None = None) -> None:
        """`compared` remembers the shapes of batches whose results were compared with those of a plain model."""
        assert len({member.batch for member in members}) == 1, "members are at the same batch"
        self.members = list(members)
        self.failures: dict[Member, Exception] = {}
        """Members that have left, with their errors."""
        self.peak_bytes = 0
        """Peak bytes of all members together, as far as measured."""
        self._compared = set() if compared is None else compared
        self._measured = 0
        self._began()

    def _began(self) -> None:
        """Stack the members as they are now."""
        members = self.members
        for member in members:
            member.pack = self
        self._kind = kind_of(members[0].optimizer, members[0].model)
        self._stack = Stack.of(members, self._kind)
        self._streams = Streams([member.random for member in members], members[0].device)
        self._model = BatchedModel([member.candidate for member in members], self._stack, self._streams)
        self._shared = share_data([member.batches for member in members])
        self._bytes = TensorBytes(self._stack.tensors())

    # Members that leave

    def settle(self, member: Member) -> None:
        """Bring a member's own state up to date, for a checkpoint."""
        self._stack.settle(member)
        member.draw_from(self._streams.captured(self._stack.members.index(member)))

    def release(self, member: Member) -> None:
        """Let a member go, with its state in tensors of its own."""
        self.settle(member)
        self._stack.release(member)
        self.forget(member)

    def forget(self, member: Member) -> None:
        """Let a member go whose state is not needed any more."""
        member.pack = None
        self.members.remove(member)

    def _fail(self, member: Member, error: Exception) -> None:
        self.failures[member] = error
        self.release(member)

    def _restack(self) -> None:
        """Close the gaps of members that have left."""
        if len(self.members) < len(self._stack.members) and self.members:
            for member in self.members:
                self.settle(member)
            self._began()

    def end(self) -> None:
        """Let all members go."""
        for member in list(self.members):
            self.release(member)

    # Training

    def train_for(self, seconds: float) -> dict[Member, Progress]:
        """Train all members until the time is up or the epoch ends, at least one batch; return where each is."""
        began = time.perf_counter()
        return self.train_while(lambda: time.perf_counter() < began + seconds)

    def train_while(self, going_on: Callable[[], bool]) -> dict[Member, Progress]:
        """Train batches until the epoch ends or `going_on` is false, at least one batch."""
        self._restack()
        began, first = time.perf_counter(), self.members[0].batch
        batches = len(self.members[0].batches)
        self._model.train()
        while self.members and self.members[0].batch < batches:
            if self._measured < MEASURED_STEPS:
                with self._bytes:
                    self._train_batch()
                self._measured += 1
                self.peak_bytes = max(self.peak_bytes, self._bytes.peak)
            else:
                self._train_batch()
            self._restack()
            if not going_on():
                break
        seconds = time.perf_counter() - began
        return {member: _progress(member, member.batch - first, seconds) for member in self.members}

    def _train_batch(self) -> None:
        before = dict(zip(self.members, self._streams.copies(), strict=True))
        inputs, targets = self._undoing(before, self._fetched)
        if not self.members:
            return
        values, gradients = self._undoing(before, lambda: self._gradients(inputs, targets))
        for member, value in zip(self._stack.members, values, strict=True):
            if not math.isfinite(value):
                self._fail(member, Diverged("the training loss", value, member.steps))
        for group in self._stack.groups:
            group.add_gradients([gradients[column.name] for column in group.columns])
        for member, value in zip(self._stack.members, values, strict=True):
            if member.pack is self:
                member.advance(value, member.batches.rows_at(member.batch))
        if self.members and self.members[0].step_due:
            self._step()

    def _undoing(self, before: dict[Member, Held], work: Callable[[], T]) -> T:
        """Run the batched model; if it fails, let all members go as they were before this batch."""
        buffers = [(tensor, tensor.clone()) for tensor in self._stack.buffers.values()]
        try:
            return work()
        except Exception as error:
            with torch.no_grad():
                for tensor, value in buffers:
                    tensor.copy_(value)
            self._streams.restore([before[member] for member in self._stack.members])
            self.end()
            raise CannotPack(reason(error)) from error

    def _fetched(self) -> tuple[Any, Any]:
        """Return the next batch of all members; those whose data raise leave."""
        position = self.members[0].batch
        if self._shared:
            epochs = [member.epoch for member in self.members]
            inputs, targets = stacked_rows([member.batches for member in self.members], epochs, position)
            return move(inputs, self._streams.device), move(targets, self._streams.device)
        found = self._each_fetched(self._streams, lambda member: member.batches.fetch(member.epoch, position))
        self._restack()
        batches = [found[member] for member in self.members]
        return stacked([each for each, _ in batches]), stacked([each for _, each in batches])

    def _each_fetched(self, streams: Streams, fetch: Callable[[Member], Any]) -> dict[Member, Any]:
        found = {}
        for row, member in enumerate(self._stack.members):
            if member.pack is not self:
                continue
            one = functools.partial(fetch, member)
            work = functools.partial(streams.run_as, row, one) if member.draws_in_data() else one
            made = self._of_user(member, work)
            if made is not None:
                found[member] = tuple(move(made, streams.device))
        return found

    def _of_user(self, member: Member, work: Callable[[], T]) -> T | None:
        """Run code of one member's user; if it raises, that member leaves, and None is returned."""
        try:
            return work()
        except Exception as error:  # code of the user may raise anything
            self._fail(member, error)
            return None

    def _gradients(self, inputs: Any, targets: Any) -> tuple[list[float], dict[str, torch.Tensor | None]]:
        """Return the loss of each member, and the gradients of all."""
        key = (self.members[0].batches.rows_at(self.members[0].batch), self._kind.signature)
        check = None if key in self._compared else comparison(self.members[:COMPARED], inputs, targets, self._streams)
        losses = self._model.losses(inputs, targets)
        leaves = {column.name: column.leaf for group in self._stack.groups for column in group.columns}
        scale = torch.full_like(losses, 1 / self.members[0].candidate.accumulate)
        found = torch.autograd.grad(losses, list(leaves.values()), scale, allow_unused=True)
        gradients: dict[str, torch.Tensor | None] = dict(zip(leaves, found, strict=True))
        if check is not None:
            check(losses.detach(), gradients, self._stack.buffers, self._streams)
            self._compared.add(key)
        values: list[float] = losses.detach().tolist()
        return values, gradients

    def _step(self) -> None:
        """Clip, step and schedule every member by its own numbers."""
        stack = self._stack
        if self.members[0].candidate.clip_grad_norm is not None:
            self._clip()
        for group in stack.groups:
            group.step(stack.members)
        for member in self.members:
            member.stepped()

    def _clip(self) -> None:
        gradients = [group.gradients for group in self._stack.groups if group.gradients is not None]
        norms = torch.stack([torch.linalg.vector_norm(each, dim=1) for each in gradients])
        limits = [member.candidate.clip_grad_norm for member in self._stack.members]
        limit = torch.tensor(limits, dtype=torch.float64).to(norms)
        factors = (limit / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0).unsqueeze(1)
        for each in gradients:
            each.mul_(factors.to(each.dtype))

    # Evaluation

    def end_epoch(self) -> dict[Member, dict[str, float]]:
        """Evaluate all members and advance them to the next epoch; return the metrics of each."""
        self._restack()
        judged = self._judged()
        found = {}
        for member in list(self.members):
            metrics = self._of_user(member, functools.partial(member.next_with, judged.get(member)))
            if metrics is not None:
                found[member] = metrics
        return found

    @torch.no_grad()
    def _judged(self) -> dict[Member, dict[str, float]]:
        """Return the sums of every metric over the validation rows, by member; empty without such data."""
        if self.members[0].valid is None or len({member.valid_shape for member in self.members}) > 1:
            return {}
        streams = self._streams.copy()
        sums: dict[Member, dict[str, float]] = {member: {} for member in self.members}
        outside = RandomState.capture(streams.device)
        self._model.eval()
        try:
            for position in range(len(self.members[0].valid)):
                self._judge_batch(position, streams, sums)
        except Exception as error:  # what has no batched form is evaluated member by member
            logger.info("members of a pack are evaluated one by one: %s", reason(error))
            return {}
        finally:
            self._model.train()
        if not outside.same_as(RandomState.capture(streams.device)):
            outside.restore(streams.device)
            return {}  # a metric draws random numbers, and each trial has its own
        return {member: each for member, each in sums.items() if member.pack is self}

    def _judge_batch(self, position: int, streams: Streams, sums: dict[Member, dict[str, float]]) -> None:
        loaders = [member.valid for member in self._stack.members if member.valid is not None]
        if share_data(loaders):
            inputs, targets = move(loaders[0].fetch(0, position), streams.device)
            outputs = self._model.outputs(inputs, streams, shared=True)
            each = [targets] * len(loaders)
        else:
            found = self._each_fetched(
                streams, lambda member: loaders[self._stack.members.index(member)].fetch(0, position)
            )
            missing = next(iter(found.values()))
            batches = [found.get(member, missing) for member in self._stack.members]
            outputs = self._model.outputs(stacked([inputs for inputs, _ in batches]), streams, shared=False)
            each = [targets for _, targets in batches]
        for row, member in enumerate(self._stack.members):
            if member.pack is not self:
                continue
            own = tree_map(operator.itemgetter(row), outputs)
            judged = self._of_user(member, functools.partial(member.judge_outputs, own, each[row]))
            if judged is None:
                continue
            rows = loaders[row].rows_at(position)
            for name, value in judged.items():
                sums[member][name] = sums[member].get(name, 0.0) + value * rows


def _progress(member: Member, batches: int, seconds: float) -> Progress:
    return Progress(
        epoch=member.epoch, batch=member.batch, batches=len(member.batches), steps=member.steps,
        loss=member.loss_sum / max(member.loss_rows, 1), batches_done=batches, seconds=seconds,
    )  # fmt: skip
