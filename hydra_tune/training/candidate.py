"""The candidate that a build function returns: one model and everything needed to train and judge it.

A Candidate holds no training state and starts nothing; strategies read it. It is checked when it is made, in the
process that runs the user's code, so that a mistake shows before a device is touched.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from hydra_tune.core.errors import CandidateError, quoted

Loss: TypeAlias = Callable[[Any, Any], torch.Tensor]
Metric: TypeAlias = Callable[[Any, Any], Any]
OptimizerFactory: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
SchedulerFactory: TypeAlias = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
Dataset: TypeAlias = Any
"""A map-style dataset of (inputs, targets): anything with `__len__` and `__getitem__`."""


class Pinned:
    """Training data in partitions that may not move: each is read only by the worker of its own subnet.

    `Pinned(load_north, load_south)`: functions that return a map-style dataset each, called in that worker. For the
    strategy `ist` with `data: pinned`.
    """

    def __init__(self, *partitions: Callable[[], Dataset]) -> None:
        for partition in partitions:
            if not callable(partition):
                raise CandidateError(f"Pinned cannot hold {quoted(partition)}", "give functions that return a dataset")
        if len(partitions) < 2:
            raise CandidateError(f"Pinned has {len(partitions)} partitions", "give two or more")
        self.partitions = partitions

    def __len__(self) -> int:
        raise CandidateError("Candidate.train is pinned to its partitions", "use strategy ist with data: pinned")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model to train, with its loss, optimizer, data and schedule.

    `loss(outputs, targets)` is the mean over the batch. `optimizer(params)` makes the optimizer, for example
    `partial(torch.optim.AdamW, lr=lr)`. `train` and `valid` are map-style datasets of `(inputs, targets)` or
    functions that return one; a tensor is passed as `model(inputs)`, a tuple or list as `model(*inputs)`, a dict as
    `model(**inputs)`.
    """

    model: nn.Module
    loss: Loss
    optimizer: OptimizerFactory
    train: Dataset | Callable[[], Dataset] | Pinned
    valid: Dataset | Callable[[], Dataset] | None = None
    batch_size: int
    epochs: int
    collate: Callable[[list[Any]], Any] | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    scheduler: SchedulerFactory | None = None
    schedule_every: Literal["epoch", "step"] = "epoch"
    clip_grad_norm: float | None = None
    accumulate: int = 1
    drop_last: bool = False
    keep: Literal["last", "best"] = "last"
    shuffle: bool = True
    split_points: Sequence[str] = ()
    sparsity: float | None = None
    whole_because: str = ""
    """Reason why the model cannot be cut, if its maker knows one: it is then trained whole."""

    @classmethod
    def from_lightning(cls, module: Any, datamodule: Any = None, *, epochs: int, **options: Any) -> Candidate:
        """Return a LightningModule as a candidate, with its loaders, optimizer, schedule and logged metrics.

        See `hydra_tune.lightning.candidate.from_lightning` for the options.
        """
        # By name, because `lightning` imports this package.
        made: Candidate = importlib.import_module("hydra_tune.lightning.candidate").from_lightning(
            module, datamodule, epochs=epochs, **options
        )
        return made

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise _wrong("model", self.model, "give a torch.nn.Module")
        for name in ("loss", "optimizer"):
            if not callable(getattr(self, name)):
                raise _wrong(name, getattr(self, name), _CALLABLE_HINTS[name])
        if isinstance(self.optimizer, torch.optim.Optimizer):
            raise _wrong("optimizer", self.optimizer, _CALLABLE_HINTS["optimizer"])
        for name in ("collate", "scheduler"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise _wrong(name, getattr(self, name), _CALLABLE_HINTS[name])
        self._check_data()
        self._check_numbers()
        self._check_choices()

    def _check_data(self) -> None:
        if self.train is None:
            raise _wrong("train", None, "give a dataset of (inputs, targets) or a function that returns one")
        for name in ("train", "valid"):
            data = getattr(self, name)
            if name == "train" and isinstance(data, Pinned):
                continue
            if data is not None and not is_dataset(data) and not callable(data):
                raise _wrong(name, data, "give a dataset with __len__ and __getitem__, or a function that returns one")

    def _check_numbers(self) -> None:
        for name in ("batch_size", "epochs", "accumulate"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise _wrong(name, value, "give a whole number of at least 1")
        clip = self.clip_grad_norm
        if clip is not None and (isinstance(clip, bool) or not isinstance(clip, int | float) or not clip > 0):
            raise _wrong("clip_grad_norm", clip, "give a positive number, or None for no clipping")
        part = self.sparsity
        if part is not None and (isinstance(part, bool) or not isinstance(part, int | float) or not 0 <= part < 1):
            raise _wrong("sparsity", part, "give a number from 0 to below 1, or None for the strategy's own")

    def _check_choices(self) -> None:
        for name, allowed in (("schedule_every", ("epoch", "step")), ("keep", ("last", "best"))):
            if getattr(self, name) not in allowed:
                raise _wrong(name, getattr(self, name), "give " + " or ".join(map(repr, allowed)))
        if not isinstance(self.metrics, Mapping):
            raise _wrong("metrics", self.metrics, "give a dict of name to function(outputs, targets)")
        for metric, function in self.metrics.items():
            if not isinstance(metric, str) or not metric or metric == "loss":
                raise _wrong("metrics", metric, "name each metric with a text other than 'loss', which is always there")
            if not callable(function):
                raise _wrong(f"metrics[{metric!r}]", function, "give a function(outputs, targets)")
        if isinstance(self.split_points, str):
            raise _wrong("split_points", self.split_points, "give a list of module names")
        modules = dict(self.model.named_modules())
        for point in self.split_points:
            if point not in modules:
                raise _wrong("split_points", point, "name a module of the model, as in model.named_modules()")


def batch_loss(candidate: Candidate, outputs: Any, targets: Any) -> torch.Tensor:
    """Return the loss of a batch to train on; raise a CandidateError for what cannot be trained on."""
    loss = candidate.loss(outputs, targets)
    if not isinstance(loss, torch.Tensor):
        raise CandidateError(f"Candidate.loss returned {quoted(loss)}", "return a tensor of one number, the mean")
    if loss.numel() != 1:
        raise CandidateError(
            f"Candidate.loss returned a tensor of shape {tuple(loss.shape)}", "return the batch's mean: loss.mean()"
        )
    if not loss.requires_grad and torch.is_grad_enabled():
        raise CandidateError(
            "Candidate.loss returned a tensor without a gradient", "do not detach it, and use no .item() in between"
        )
    return loss


def make_optimizer(candidate: Candidate, model: nn.Module) -> torch.optim.Optimizer:
    """Return the candidate's optimizer of a model; raise a CandidateError if it is none."""
    made = candidate.optimizer(list(model.parameters()))
    if not isinstance(made, torch.optim.Optimizer):
        raise CandidateError(f"Candidate.optimizer returned {quoted(made)}", _CALLABLE_HINTS["optimizer"])
    return made


_CALLABLE_HINTS = {
    "loss": "give a function(outputs, targets) that returns the batch's mean loss",
    "optimizer": "give a function of the parameters, such as partial(torch.optim.AdamW, lr=1e-3)",
    "collate": "give a function of a list of samples, as for a DataLoader",
    "scheduler": "give a function of the optimizer that returns an LRScheduler",
}


def is_dataset(data: object) -> bool:
    """True if `data` is a map-style dataset rather than a function that returns one."""
    return isinstance(data, Sized) and hasattr(data, "__getitem__") and not isinstance(data, str | bytes)


def _wrong(name: str, value: object, hint: str) -> CandidateError:
    return CandidateError(f"Candidate.{name} cannot be {quoted(value)}", hint)
