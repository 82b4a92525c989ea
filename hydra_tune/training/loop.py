"""The plain training loop of one candidate on one device, in pieces that can stop after any batch.

All exact strategies are measured against this loop: batches in `epoch_order`, each batch's loss divided by
`accumulate`, an optimizer step after every `accumulate` batches and at the end of each epoch, one random stream from
the trial's seed. Nothing here depends on processes or scheduling.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hydra_tune.core.errors import CandidateError
from hydra_tune.core.metric_value import as_number
from hydra_tune.core.moving import move_module
from hydra_tune.core.random_state import RandomState
from hydra_tune.core.seeds import seed_everything
from hydra_tune.core.tensor_memory import TensorBytes
from hydra_tune.core.trees import call_model, move
from hydra_tune.core.weights import save_weights
from hydra_tune.training.batches import Batches
from hydra_tune.training.candidate import Candidate, Dataset, batch_loss, make_optimizer
from hydra_tune.training.progress import Diverged, Progress

# The first optimizer step creates the optimizer's state, the second runs with all of it: from then on every batch of
# one size takes the same memory, and counting would only cost time.
MEASURED_STEPS = 2

_POSITION = ("epoch", "batch", "steps", "loss_sum", "loss_rows")


class Training:
    """A candidate in training: the model, its optimizer and schedule, and the position in the data."""

    def __init__(
        self, candidate: Candidate, train: Dataset, valid: Dataset | None, seed: int, device: torch.device
    ) -> None:
        self.candidate = candidate
        self.device = device
        self.batches = Batches(candidate, train, training=True, seed=seed)
        self.valid = None if valid is None else Batches(candidate, valid, training=False)
        self.model: nn.Module = move_module(candidate.model, device)
        self.optimizer = make_optimizer(candidate, self.model)
        if isinstance(self.optimizer, torch.optim.LBFGS):
            raise CandidateError("optimizer LBFGS needs a closure, which training has not", "use another optimizer")
        self.scheduler = candidate.scheduler(self.optimizer) if candidate.scheduler else None
        self.epoch = 0
        self.batch = 0
        self.steps = 0
        self._measured = 0
        self._tensors = TensorBytes([*self.model.parameters(), *self.model.buffers()])
        self.kept: dict[str, torch.Tensor] | None = None
        self.history: list[dict[str, float]] = []
        """Metrics of the epochs so far."""
        self.loss_sum = 0.0
        self.loss_rows = 0
        seed_everything(seed)
        self._random = RandomState.capture(device)

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of this trial's tensors."""
        return self._tensors.peak

    @property
    def resident_bytes(self) -> int:
        """Bytes of this trial's live tensors; known only while they are counted."""
        return self._tensors.live

    def train_for(self, seconds: float) -> Progress:
        """Train until the time is up or the epoch ends, at least one batch."""
        end = time.perf_counter() + seconds
        return self._train_while(lambda: time.perf_counter() < end)

    def train_steps(self, count: int) -> Progress:
        """Train for `count` optimizer steps, or until the epoch ends."""
        end = self.steps + count
        return self._train_while(lambda: self.steps < end)

    def _train_while(self, going_on: Callable[[], bool]) -> Progress:
        began, first = time.perf_counter(), self.batch
        self.model.train()
        self._random.restore(self.device)
        while self.batch < len(self.batches):
            if self._measured < MEASURED_STEPS:
                self._measured_batch()
            else:
                self._train_batch()
            if not going_on():
                break
        self._random = RandomState.capture(self.device)
        mean = self.loss_sum / max(self.loss_rows, 1)
        return Progress(
            epoch=self.epoch, batch=self.batch, batches=len(self.batches), steps=self.steps, loss=mean,
            batches_done=self.batch - first, seconds=time.perf_counter() - began,
        )  # fmt: skip

    def _train_batch(self) -> None:
        candidate = self.candidate
        inputs, targets = move(self.batches.fetch(self.epoch, self.batch), self.device)
        loss = batch_loss(candidate, self.forward(inputs), targets)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise Diverged("the training loss", value, self.steps)
        (loss / candidate.accumulate).backward()  # type: ignore[no-untyped-call]
        self.advance(value, self.batches.rows_at(self.batch))
        if self.step_due:
            self._step()

    def advance(self, loss: float, rows: int) -> None:
        """Count a batch whose gradients have been computed."""
        self.batch += 1
        self.loss_sum += loss * rows
        self.loss_rows += rows

    @property
    def step_due(self) -> bool:
        """True if an optimizer step follows the last batch."""
        return self.batch % self.candidate.accumulate == 0 or self.batch == len(self.batches)

    def forward(self, inputs: Any) -> Any:
        """Return the model's outputs."""
        return call_model(self.model, inputs)

    def _step(self) -> None:
        if self.candidate.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.candidate.clip_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.stepped()

    def stepped(self) -> None:
        """Count an optimizer step, and step a schedule of steps."""
        self.steps += 1
        if self.scheduler is not None and self.candidate.schedule_every == "step":
            self.scheduler.step()

    def _measured_batch(self) -> None:
        """Train one batch with every tensor counted."""
        before = self.steps
        with self._tensors:
            self._train_batch()
        self._measured += self.steps - before

    def end_epoch(self) -> dict[str, float]:
        """Evaluate the epoch and go to the next one; return every metric by name."""
        judged = self.judge()
        self.next_epoch(judged)
        return judged

    def judge(self) -> dict[str, float]:
        """Return every metric of the epoch, by name."""
        return self.with_train_loss(self.evaluate())

    def with_train_loss(self, evaluated: dict[str, float]) -> dict[str, float]:
        """Return the metrics of an evaluation, which may be empty, with the training loss of the epoch."""
        train_loss = self.loss_sum / max(self.loss_rows, 1)
        return {"train_loss": train_loss, **(evaluated or {"loss": train_loss})}

    def next_epoch(self, judged: dict[str, float]) -> None:
        """Step an epoch schedule, and go to the next epoch."""
        if self.scheduler is not None and self.candidate.schedule_every == "epoch":
            if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(judged["loss"])
            else:
                self.scheduler.step()
        self.epoch, self.batch = self.epoch + 1, 0
        self.loss_sum, self.loss_rows = 0.0, 0
        self.history.append(judged)

    def state(self) -> dict[str, Any]:
        """Return the state to resume from here in another process, on the same batch."""
        pending = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        tensors = {"tensors": self.named_tensors(), "gradients": pending, "optimizer": self.optimizer.state_dict()}
        return {**tensors, **self.rest()}

    def rest(self) -> dict[str, Any]:
        """Return the state without the tensors and the optimizer."""
        return {
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "random": self._random.state(),
            "position": {name: getattr(self, name) for name in _POSITION},
            "history": self.history,
            "kept": self.kept,
            "data": self.data_shape(),
            "extra": {name: module.get_extra_state() for name, module in modules_with_extra_state(self.model)},
        }

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """Return every parameter and buffer, tied ones once."""
        return named_tensors(self.model)

    def data_shape(self) -> tuple[int, int, int]:
        return self.batches.rows, self.batches.size, len(self.batches)

    def draw_from(self, random: RandomState) -> None:
        """Continue with other random streams than the seed's."""
        self._random = random

    def begin_streams(self) -> None:
        """Set this process's random generators to the state from which the trial's next batch draws."""
        self._random.restore(self.device)

    def is_measured(self) -> None:
        """Count no memory: the peak is known from another training of this size."""
        self._measured = MEASURED_STEPS

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a state of the same candidate."""
        own, saved = self.named_tensors(), state["tensors"]
        if own.keys() != saved.keys() or any(own[name].shape != saved[name].shape for name in own):
            raise ValueError("it is of another model")
        if tuple(state["data"]) != self.data_shape():
            raise ValueError("it is of other data")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(saved[name])
        parameters = dict(self.model.named_parameters())
        for name, gradient in state["gradients"].items():
            parameters[name].grad = gradient.to(self.device)
        self._restore_optimizer(state["optimizer"])
        self._restore_rest(state)

    def _restore_rest(self, state: dict[str, Any]) -> None:
        """Restore the part of the state that `rest` returns."""
        for name, module in modules_with_extra_state(self.model):
            module.set_extra_state(state["extra"][name])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self._random = RandomState.from_state(state["random"])
        for name, value in state["position"].items():
            setattr(self, name.removeprefix("_"), value)
        self.history, self.kept = state["history"], state["kept"]

    def _restore_optimizer(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)
        # torch casts state to its parameter's dtype; state of another dtype is restored exactly.
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for index, saved in state["state"].items():
            current = self.optimizer.state[parameters[index]]
            for key, value in saved.items():
                if isinstance(value, torch.Tensor) and current[key].dtype != value.dtype:
                    current[key] = value.to(current[key].device)

    def keep_weights(self) -> None:
        """Remember the current weights, for a candidate that keeps its best epoch."""
        self.kept = {name: tensor.detach().cpu().clone() for name, tensor in self.named_tensors().items()}

    def save(self, path: Path) -> None:
        """Write the remembered weights, or else the current ones."""
        if self.kept is not None:
            with torch.no_grad():
                for name, tensor in self.named_tensors().items():
                    tensor.copy_(self.kept[name])
        save_weights(self.model, path)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return every metric on the validation data; empty without such data."""
        if self.valid is None:
            return {}
        sums: dict[str, float] = {}
        with _in_evaluation(self.model, self.device):
            # Random numbers drawn by a validation set come from this trial's stream, not from the previous trial's.
            self._random.restore(self.device)
            for position in range(len(self.valid)):
                inputs, targets = move(self.valid.fetch(0, position), self.device)
                for name, value in self.judge_batch(inputs, targets).items():
                    sums[name] = sums.get(name, 0.0) + value * self.valid.rows_at(position)
        return self.mean_metrics(sums)

    def mean_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the means of metrics that are sums over the validation rows."""
        assert self.valid is not None
        means = {name: total / self.valid.rows for name, total in sums.items()}
        if not math.isfinite(means["loss"]):
            raise Diverged("the validation loss", means["loss"], self.steps)
        return means

    def judge_batch(self, inputs: Any, targets: Any) -> dict[str, float]:
        """Return the loss and metrics of one batch, in the model's current mode."""
        return self.judge_outputs(self.forward(inputs), targets)

    def judge_outputs(self, outputs: Any, targets: Any) -> dict[str, float]:
        """Return the loss and metrics of a batch's outputs."""
        judged = {"loss": float(self.candidate.loss(outputs, targets))}
        for name, metric in self.candidate.metrics.items():
            judged[name] = as_number(metric(outputs, targets), f"metric {name!r}")
        return judged


def modules_with_extra_state(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that keep state besides tensors, with their names."""
    plain = nn.Module.get_extra_state
    return [(name, module) for name, module in model.named_modules() if type(module).get_extra_state is not plain]


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer of a model, tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@contextmanager
def _in_evaluation(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put the model in eval mode, then restore each module's own mode and the random streams."""
    modes = {module: module.training for module in model.modules()}
    before = RandomState.capture(device)
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        before.restore(device)
