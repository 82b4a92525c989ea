"""A client of an elastic trial: plain training on its share of the batches, with periodic exchanges.

A client with several workers is a gang: each of its m workers takes every m-th batch, and before each step their
gradients are averaged by rows, as one flat vector in buckets. The average is the gradient of one batch with all their
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hydra_tune.strategies.elastic.centre import Centre
from hydra_tune.strategies.elastic.rules import asynchronous, elastic
from hydra_tune.strategies.elastic.work import Work
from hydra_tune.strategies.subnets.phase import EveryNth, Phase, RoundsKit, State
from hydra_tune.training.batches import Batches

BUCKET_BYTES = 25 * 2**20
"""Gradients are averaged in pieces of this size."""


class ParameterRange:
    """The batches of an epoch from `start` to before `stop`."""

    def __init__(self, batches: Batches, start: int, stop: int) -> None:
        self.all = batches
        self.start = start
        self.stop = stop

    def __len__(self) -> int:
        return self.stop - self.start

    def rows_at(self, position: int) -> int:
        return self.all.rows_at(self.start + position)

    def fetch(self, epoch: int, position: int) -> tuple[Any, Any]:
        return self.all.fetch(epoch, self.start + position)


class Client(Phase):
    """A client, or one worker of a client with several."""

    def __init__(
        self, kit: RoundsKit, state: State, device: torch.device, centre: Centre, *, rank: int = 0, size: int = 1
    ) -> None:
        super().__init__(kit, state, turn=0, index=0, device=device)
        self.centre = centre
        self.rank = rank
        self.size = size
        self.server_bytes = 0
        self.collective_bytes = 0
        self.exchanges = 0
        self._all = Batches(kit.candidate, kit.train, training=True, seed=kit.seed)
        self._rows = 0
        """Rows of the batches since the last step."""
        self._work: Work | None = None
        self._since = 0
        """Steps since the last exchange."""
        self._base = {name: tensor.detach().cpu().clone() for name, tensor in self.named_tensors().items()}
        self.on_step: Callable[[], None] = lambda: None

    def work(self, work: Work) -> None:
        """Train on the given batches, exchanging with the centre every `tau` steps and at the end."""
        self._work = work
        self.epoch, self.batch = work.epoch, 0
        self.loss_sum, self.loss_rows = 0.0, 0
        span = ParameterRange(self._all, work.start, work.stop)
        self.batches = EveryNth(span, self.rank, self.size)  # type: ignore[assignment, arg-type]
        longest = -(-len(span) // self.size)
        target = self.steps + -(-longest // self.candidate.accumulate)
        if len(self.batches):
            self.train_steps(target - self.steps)
        while self.steps < target:
            self._step()  # a worker without batches contributes zero rows to the average
        if self._since and work.mode != "allreduce":
            self.exchange()

    def _train_batch(self) -> None:
        self._rows += self.batches.rows_at(self.batch)
        super()._train_batch()

    def _step(self) -> None:
        if self.size > 1:
            self._average_gradients()
        self._rows = 0
        super()._step()
        self.on_step()
        self._since += 1
        assert self._work is not None
        if self._work.mode != "allreduce" and self._since >= self._work.tau:
            self.exchange()

    def exchange(self) -> None:
        """Exchange with the centre; in a gang, the first worker does so and broadcasts the result."""
        assert self._work is not None
        own = {name: tensor.detach() for name, tensor in self.named_tensors().items()}
        if self.rank == 0:
            if self._work.mode == "async":
                self.server_bytes += self.centre.exchange(own, asynchronous(self._base))
                self._base = {name: tensor.cpu().clone() for name, tensor in own.items()}
            else:
                self.server_bytes += self.centre.exchange(own, elastic(self._work.alpha))
            self.exchanges += 1
        if self.size > 1:
            for tensor in own.values():
                dist.broadcast(tensor, src=0)
                self.collective_bytes += tensor.nbytes if self.rank else 0
        self._since = 0

    def _average_gradients(self) -> None:
        """Average the gradients over the gang, weighted by rows; a gradient that no worker has stays None."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])
        flat *= self._rows
        present = torch.tensor([float(p.grad is not None) for p in parameters] + [float(self._rows)], dtype=flat.dtype)
        flat = torch.cat([flat, present.to(flat.device)])
        piece = BUCKET_BYTES // flat.element_size()
        for at in range(0, len(flat), piece):
            dist.all_reduce(flat[at : at + piece])
        self.collective_bytes += 2 * flat.nbytes
        rows = flat[-1]
        at = 0
        for index, parameter in enumerate(parameters):
            size = parameter.numel()
            there = bool(flat[-1 - len(parameters) + index] > 0)
            parameter.grad = flat[at : at + size].view_as(parameter) / rows if there else None
            at += size

    def take_options(self, groups: Sequence[dict[str, Any]]) -> None:
        """Load the trial's current learning rates and other options."""
        for group in self.optimizer.param_groups:
            group.update(groups[self._group_of(group)])

    def state(self) -> State:
        """Return the client's state, for another process to continue from."""
        found = self.result()
        groups = [found["groups"][group] for group in sorted(found["groups"])]
        position = {"epoch": self.epoch, "batch": 0, "steps": self.steps}
        return {**found, "groups": groups, "random": [found["random"]], "position": position}
