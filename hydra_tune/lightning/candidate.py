"""A LightningModule as a candidate: its loaders, steps, optimizer and schedule in the form strategies need.

Features that only a Trainer supports are refused by name; the callback in an objective supports them all.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from hydra_tune.core.errors import CandidateError
from hydra_tune.core.trees import call_model
from hydra_tune.graph.capture import untouched
from hydra_tune.lightning.bases import home_of
from hydra_tune.lightning.optimizers import ModulesOptimizer, Rescheduled, configured
from hydra_tune.lightning.split_check import StepCheck, try_step
from hydra_tune.lightning.steps import (
    OBJECTIVE,
    Before,
    RestLog,
    RestLoss,
    WholeLog,
    WholeSteps,
    number_of,
    whole_inputs,
    whole_loss,
)
from hydra_tune.training.batches import Batches
from hydra_tune.training.candidate import Candidate
from hydra_tune.training.loaders import LoaderBatches, LoaderData

HOOKS = (
    "backward", "configure_callbacks", "configure_gradient_clipping", "lr_scheduler_step", "on_after_backward",
    "on_after_batch_transfer", "on_before_backward", "on_before_batch_transfer", "on_before_optimizer_step",
    "on_before_zero_grad", "on_fit_end", "on_fit_start", "on_train_batch_end", "on_train_batch_start", "on_train_end",
    "on_train_epoch_end", "on_train_epoch_start", "on_train_start", "on_validation_batch_end",
    "on_validation_batch_start", "on_validation_end", "on_validation_epoch_end", "on_validation_epoch_start",
    "on_validation_start", "optimizer_step", "optimizer_zero_grad", "transfer_batch_to_device",
)  # fmt: skip
"""Hooks that only a Trainer calls: a module that overrides one would train differently without it."""

_set_up: weakref.WeakSet[Any] = weakref.WeakSet()
"""Data modules already set up: one shared by several builds is set up once per process."""


@dataclass(frozen=True)
class TrainingPlan:
    """Stands in for a Trainer in `configure_optimizers`: it knows the length of training."""

    max_epochs: int
    num_training_batches: int
    accumulate_grad_batches: int
    current_epoch: int = 0
    global_step: int = 0
    max_steps: int = -1

    @property
    def estimated_stepping_batches(self) -> int:
        return self.max_epochs * math.ceil(self.num_training_batches / self.accumulate_grad_batches)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own lookups, such as in pickling
            raise AttributeError(name)
        raise CandidateError(f"configure_optimizers uses its Trainer ({name!r})", OBJECTIVE)


def from_lightning(
    module: Any,
    datamodule: Any = None,
    *,
    epochs: int,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    clip_grad_norm: float | None = None,
    accumulate: int = 1,
    keep: Literal["last", "best"] = "last",
    split_points: tuple[str, ...] = (),
) -> Candidate:
    """Return a LightningModule as a candidate that every strategy can train.

    The loaders come from the datamodule, from the arguments named as in `Trainer.fit`, or from the module itself.
    `clip_grad_norm` and `accumulate` are a Trainer's `gradient_clip_val` and `accumulate_grad_batches`. Values logged
    by `validation_step` are metrics, averaged over the validation rows; `loss` is that of `training_step`.
    """
    _check(module)
    source = module if datamodule is None else _ready(datamodule)
    _call(module, "setup", "fit")
    _call(module, "configure_model")
    train = train_dataloaders if train_dataloaders is not None else _loader(source, "train_dataloader")
    valid = val_dataloaders if val_dataloaders is not None else _loader(source, "val_dataloader")
    validates = valid is not None and _own(module, "validation_step")
    first, training = _tried(module, "training_step", train)
    validation = _tried(module, "validation_step", valid)[1] if validates else None
    because = training.whole_because or (validation.whole_because if validation else "")
    names = _metric_names(validation)
    plan = TrainingPlan(epochs, len(first), accumulate)
    made = configured(module, plan)
    model: nn.Module = WholeSteps(module, validates) if because else module
    candidate = Candidate(
        model=model,
        loss=whole_loss if because else RestLoss(module),
        optimizer=ModulesOptimizer(module, plan),
        train=LoaderData.of(train, whole_inputs if because else Before(module, "training_step"), "train_dataloader"),
        valid=LoaderData.of(valid, whole_inputs if because else Before(module, "validation_step"), "val_dataloader")
        if validates
        else None,
        batch_size=first.size,
        epochs=epochs,
        metrics={name: WholeLog(name) if because else RestLog(module, name) for name in names},
        scheduler=None if made.scheduler is None else Rescheduled(made),
        schedule_every=made.interval,
        clip_grad_norm=clip_grad_norm,
        accumulate=accumulate,
        keep=keep,
        split_points=split_points,
        whole_because=because,
    )
    if made.monitor is not None:
        _check_monitor(candidate, made.monitor)
    return candidate


def _check(module: Any) -> None:
    base = home_of(module).LightningModule
    if not isinstance(module, base):
        raise CandidateError(f"a {type(module).__name__} is no LightningModule", "give the module first")
    if not module.automatic_optimization:
        raise CandidateError("the LightningModule optimizes by itself (automatic_optimization)", OBJECTIVE)
    own = [name for name in HOOKS if _own(module, name)]
    if own:
        raise CandidateError(f"the LightningModule has {', '.join(own)}, which only a Trainer calls", OBJECTIVE)
    if not _own(module, "training_step"):
        raise CandidateError("the LightningModule has no training_step", "give it one")


def _own(thing: Any, name: str) -> bool:
    """True if the user's class overrides the method of this name."""
    home = home_of(thing)
    base = home.LightningModule if isinstance(thing, home.LightningModule) else home.LightningDataModule
    return getattr(type(thing), name, None) is not getattr(base, name, None)


def _ready(datamodule: Any) -> Any:
    if datamodule not in _set_up:
        datamodule.prepare_data()
        datamodule.setup("fit")
        _set_up.add(datamodule)
    return datamodule


def _call(module: Any, name: str, *args: Any) -> None:
    if _own(module, name):
        getattr(module, name)(*args)


def _loader(source: Any, name: str) -> Any:
    """Return the loader of this name, or None; a list of one loader is accepted."""
    if not _own(source, name):
        return None
    loader = getattr(source, name)()
    if isinstance(loader, list | tuple):
        if len(loader) != 1:
            raise CandidateError(f"{name} gives {len(loader)} loaders", f"give one; or {OBJECTIVE}")
        return loader[0]
    return loader


def _tried(module: Any, step: Any, loader: Any) -> tuple[LoaderBatches, StepCheck]:
    """Return the loader's batches, and the result of the step on the first batch."""
    if loader is None:
        raise CandidateError("there is no train_dataloader", "give the module, the datamodule or this call one")
    probe: Any = None  # the batches' order does not depend on a candidate
    whole = LoaderBatches(probe, LoaderData.of(loader, whole_inputs, step), training=True)
    return whole, try_step(module, step, whole.first())


def _check_monitor(candidate: Candidate, monitor: str) -> None:
    """Raise CandidateError unless a plateau schedule monitors the validation loss, which is all it is given."""
    if candidate.valid is not None and monitor in candidate.metrics:
        inputs, targets = Batches(candidate, candidate.valid, training=False).fetch(0, 0)
        with untouched(candidate.model), torch.no_grad():
            outputs = call_model(candidate.model.eval(), inputs)
            loss, monitored = candidate.loss(outputs, targets), candidate.metrics[monitor](outputs, targets)
        if math.isclose(float(loss), monitored, rel_tol=1e-6):
            return
    raise CandidateError(
        f"the schedule monitors {monitor!r}, which is not the loss of training_step on the validation data", OBJECTIVE
    )


def _metric_names(validation: StepCheck | None) -> list[str]:
    names = list(validation.logs) if validation else []
    for name in names:
        if name in ("loss", "train_loss"):
            raise CandidateError(f"validation_step logs {name!r}, which is a search's own name", "log it as 'val_loss'")
        assert validation is not None
        number_of(name, validation.logs[name])
    return names
