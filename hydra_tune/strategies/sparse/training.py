"""The training loop of a pruned candidate on one replica: find a mask, then train the survivors.

Each replica takes its part of every batch, and the gradients are summed over the replicas, weighted by rows: so the
steps equal those of one replica with the whole batch. (Batch-norm sees the statistics of the part, and dropout draws
for each part, as in any data parallelism.) Random numbers on replicas other than the first are seeded by trial and
batch, so that a replica can be recreated at any batch.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hydra_tune.core.moving import set_data
from hydra_tune.core.random_state import RandomState
from hydra_tune.core.seeds import seed_everything
from hydra_tune.core.tensor_memory import TensorBytes
from hydra_tune.core.trees import call_model, move, some_rows
from hydra_tune.core.weights import save_weights
from hydra_tune.engine.collectives import all_reduce
from hydra_tune.graph.program import HALF, in_full
from hydra_tune.strategies.pipeline.schedule import bounds
from hydra_tune.strategies.shard.optimizers import OptimizerParts, options_of
from hydra_tune.strategies.sparse.first_masks import check_candidate, first_masks
from hydra_tune.strategies.sparse.masks import EarlyBird, Masks, prunable
from hydra_tune.strategies.sparse.pruned_trial import Account
from hydra_tune.strategies.sparse.pruning import Pruning
from hydra_tune.strategies.sparse.sizes import dense_state_bytes
from hydra_tune.strategies.sparse.state import CompressedState, trained_parameters
from hydra_tune.training.candidate import batch_loss
from hydra_tune.training.loop import MEASURED_STEPS, Training
from hydra_tune.training.prepared import Prepared
from hydra_tune.training.progress import Diverged, Progress


def parts_of(rows: int, replicas: int, *, in_pairs: bool) -> list[tuple[int, int]]:
    """Return first and end row of each replica's part of a batch; `in_pairs` leaves no replica a single row of several.

    Batch-norm cannot take one row, so some replicas then have none.
    """
    count = min(replicas, rows // 2) if in_pairs and rows > 1 else replicas
    return [*bounds(rows, count), *[(rows, rows)] * (replicas - count)]


class SparseTraining(Training):
    """One replica of a candidate in training."""

    def __init__(
        self, prepared: Prepared, seed: int, device: torch.device, pruning: Pruning, rank: int, size: int
    ) -> None:
        super().__init__(prepared.candidate, prepared.train, prepared.valid, seed, device)
        self.seed, self.rank, self.size = seed, rank, size
        self.pruning = pruning
        self.normed = any(isinstance(module, _BatchNorm) for module in self.model.modules())
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self.parts = OptimizerParts.of(self.optimizer, names)
        check_candidate(self.model, self.optimizer)
        self.trained = trained_parameters(self.model, self.parts)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name in self.trained)  # parameters without an optimizer need no gradient
        # The optimizer made by the user's factory only holds the options for the schedule; others make the steps.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        self.mixed = pruning.mixed and next(self.model.parameters()).dtype == torch.float32
        self.search: EarlyBird | None = None
        self.first_weights: dict[str, torch.Tensor] | None = None
        masks = first_masks(self.model, pruning, seed)
        if masks is None:
            self.search = EarlyBird()
            if pruning.rewind:
                self.first_weights = {name: p.detach().clone() for name, p in prunable(self.model).items()}
        self._compress(masks or {})

    # Masks

    def _compress(self, masks: Masks) -> None:
        """Create the state for these masks; without masks it is that of dense training, in full precision."""
        self.weights = CompressedState(
            self.trained, masks, self.parts, options_of(self.optimizer), mixed=self.mixed and bool(masks)
        )
        self.weights.replicas = self.size
        self._count_anew()

    def _count_anew(self) -> None:
        """Restart memory counting: the live tensors changed."""
        self._tensors = TensorBytes([*self.weights.tensors(), *self.model.buffers()])
        self._measured = 0

    def look_for_mask(self) -> None:
        """After a dense epoch, prune if the mask has settled or the search is over.

        Runs before the first batch of the next epoch, so that the weights kept for an epoch are those that were
        evaluated.
        """
        if self.search is None or self.epoch == 0 or self.batch:
            return
        apart = self.search.see(self.model, self.pruning.sparsity, self.pruning.least)
        if apart > self.search.threshold and self.epoch < self.pruning.dense_epochs:
            return
        masks, dense = self.search.recent[-1], self.weights
        dense.close()
        if self.first_weights is not None:
            with torch.no_grad():
                for name, parameter in prunable(self.model).items():
                    parameter.copy_(self.first_weights[name])
        self._compress(masks)
        if self.first_weights is None:
            self.weights.inherit(dense)
            self._count_anew()
        self.search, self.first_weights = None, None

    # Training

    def train_batches(self, count: int) -> Progress:
        """Train this many batches, at most to the end of the epoch; all replicas stop after the same batch."""
        began, first = time.perf_counter(), self.batch
        before = self.loss_sum, self.loss_rows
        self.model.train()
        self._random.restore(self.device)
        while self.batch < len(self.batches) and self.batch - first < count:
            if self.rank:
                seed_everything(hash((self.seed, self.epoch, self.batch, self.rank)) % 2**31)
            self._measured_batch() if self._measured < MEASURED_STEPS else self._train_batch()
        self._random = RandomState.capture(self.device)
        if self.size > 1:
            # Sum the losses of all replicas since the start of this call.
            since = [self.loss_sum - before[0], self.loss_rows - before[1]]
            seen = torch.tensor(since, dtype=torch.float64, device=self.device)
            all_reduce(seen)
            self.loss_sum, self.loss_rows = before[0] + float(seen[0]), before[1] + int(seen[1])
        return Progress(
            epoch=self.epoch, batch=self.batch, batches=len(self.batches), steps=self.steps,
            loss=self.loss_sum / max(self.loss_rows, 1), batches_done=self.batch - first,
            seconds=time.perf_counter() - began,
        )  # fmt: skip

    def _train_batch(self) -> None:
        candidate = self.candidate
        rows = self.batches.rows_at(self.batch)
        start, stop = parts_of(rows, self.size, in_pairs=self.normed)[self.rank]
        inputs, targets = move(self.batches.fetch(self.epoch, self.batch), self.device)
        after = self.batch + 1
        stepping = after % candidate.accumulate == 0 or after == len(self.batches)
        self.weights.more = not stepping
        if stop > start:
            self._backward(
                some_rows(inputs, rows, start, stop), some_rows(targets, rows, start, stop), stop - start, rows
            )
        self.batch = after
        if stepping:
            self._step()

    def _backward(self, inputs: Any, targets: Any, own: int, rows: int) -> None:
        loss = batch_loss(self.candidate, self.forward(inputs), targets)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise Diverged("the training loss", value, self.steps)
        weighted = loss if own == rows else loss * (own / rows)
        (weighted / self.candidate.accumulate).backward()  # type: ignore[no-untyped-call]
        self.loss_sum += value * own
        self.loss_rows += own

    def _step(self) -> None:
        self.weights.step(options_of(self.optimizer), self.candidate.clip_grad_norm)
        self.steps += 1
        if self.scheduler is not None and self.candidate.schedule_every == "step":
            self.scheduler.step()

    def forward(self, inputs: Any) -> Any:
        if not self.weights.layers or not self.mixed:
            return call_model(self.model, inputs)
        with torch.autocast(self.device.type, dtype=HALF):
            outputs = call_model(self.model, inputs)
        return in_full(outputs)

    # State

    def named_tensors(self) -> dict[str, torch.Tensor]:
        return {**super().named_tensors(), **self.weights.named_tensors()}

    def state(self) -> dict[str, Any]:
        return {
            **self.rest(),
            "buffers": dict(self.model.named_buffers()),
            "fixed": {n: p.data for n, p in self.model.named_parameters() if n not in self.trained},
            "weights": self.weights.state(),
            "groups": list(options_of(self.optimizer)),
            "search": None if self.search is None else self.search.state(),
            "first_weights": self.first_weights,
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        if "weights" not in state:
            raise ValueError("it is of another strategy")
        pruned, whole = state["weights"]["pruned"], state["weights"]["whole"]
        if {*pruned, *whole} != set(self.trained):
            raise ValueError("it is of another model")
        if tuple(state["data"]) != self.data_shape():
            raise ValueError("it is of other data")
        own = {**dict(self.model.named_buffers()), **dict(self.model.named_parameters())}
        with torch.no_grad():
            for name, tensor in {**state["buffers"], **state["fixed"]}.items():
                own[name].copy_(tensor)
        for group, options in zip(self.optimizer.param_groups, state["groups"], strict=True):
            group.update(options)
        self.weights.close()
        self._compress({name: saved["index"] for name, saved in pruned.items()})
        self.weights.restore(state["weights"])
        self._count_anew()
        self.search = None
        if state["search"] is not None:
            self.search = EarlyBird()
            self.search.restore(state["search"])
        self.first_weights = state["first_weights"]
        self._restore_rest(state)

    def save(self, path: Any) -> None:
        """Write the final weights, in the candidate's own dtype."""
        tensors = self.kept or self.named_tensors()
        self.weights.close()
        with torch.no_grad():
            for name, tensor in super().named_tensors().items():
                set_data(tensor, tensors[name].to(self.device))
        save_weights(self.model, path)

    def account(self) -> Account:
        """Return the bytes of state and of each step, counted from the tensors."""
        trained = list(self.trained.values())
        moments = self.weights.moments()
        wide = 8 if trained[0].dtype == torch.float64 else 4
        numbers = sum(p.numel() for p in trained)
        return Account(
            state_bytes=self.weights.state_bytes(),
            dense_state_bytes=dense_state_bytes(numbers, mixed=self.mixed, moments=moments, number=wide),
            step_bytes=sum(flat.numel() * flat.element_size() for flat in self.weights.gradients()),
            dense_step_bytes=numbers * (2 if self.mixed else wide),
            survivors=sum(len(layer.index) for layer in self.weights.layers),
            pruned=sum(layer.weight.numel() for layer in self.weights.layers),
            phase="sparse" if self.weights.layers else "dense",
        )  # fmt: skip
