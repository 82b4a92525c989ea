"""Converts the result of a LightningModule's `configure_optimizers` to a candidate's optimizer and schedule."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from hydra_tune.core.errors import CandidateError, quoted

Interval = Literal["epoch", "step"]


@dataclass(frozen=True)
class Configured:
    """One optimizer, and optionally its schedule."""

    optimizer: torch.optim.Optimizer
    scheduler: Any = None
    interval: Interval = "epoch"
    monitor: str | None = None


def configured(module: Any, plan: Any) -> Configured:
    """Call `configure_optimizers`, with `plan` in place of a Trainer, and parse the result."""
    module.trainer = plan
    try:
        made = module.configure_optimizers()
    finally:
        module.trainer = None
    schedulers: Any = []
    match made:
        case torch.optim.Optimizer():
            optimizers: Any = [made]
        case {"optimizer": one, **others}:
            optimizers = [one]
            schedulers = [others["lr_scheduler"]] if others.get("lr_scheduler") is not None else []
        case [[*optimizers], [*schedulers]] | [[*optimizers], dict(schedulers)]:
            schedulers = [schedulers] if isinstance(schedulers, dict) else schedulers
        case [*optimizers] if all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
            pass
        case _:
            raise CandidateError(
                f"configure_optimizers returned {quoted(made)}", "return an optimizer, or a dict or lists with one"
            )
    if len(optimizers) != 1 or len(schedulers) > 1:
        raise CandidateError(
            f"configure_optimizers returned {len(optimizers)} optimizers and {len(schedulers)} schedules",
            "give one of each, or train with HydraTuneCallback in an objective",
        )
    return _with_schedule(optimizers[0], schedulers[0] if schedulers else None)


def _with_schedule(optimizer: torch.optim.Optimizer, schedule: Any) -> Configured:
    options = dict(schedule) if isinstance(schedule, Mapping) else {"scheduler": schedule}
    scheduler = options.get("scheduler")
    interval = options.get("interval", "epoch")
    if interval not in ("epoch", "step"):
        raise CandidateError(f"a schedule's interval cannot be {quoted(interval)}", "give 'epoch' or 'step'")
    if options.get("frequency", 1) != 1:
        raise CandidateError(f"a schedule's frequency cannot be {quoted(options['frequency'])}", "step it every time")
    plateau = isinstance(scheduler, ReduceLROnPlateau)
    if plateau and (interval != "epoch" or not options.get("monitor")):
        raise CandidateError(
            "a ReduceLROnPlateau needs a metric each epoch", "give interval 'epoch' and monitor, such as 'val_loss'"
        )
    return Configured(optimizer, scheduler, interval, options["monitor"] if plateau else None)


@dataclass(frozen=True)
class ModulesOptimizer:
    """A candidate's optimizer: a new one from `configure_optimizers`, over the module's own parameters."""

    module: Any
    plan: Any

    def __call__(self, _params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return configured(self.module, self.plan).optimizer


class Rescheduled:
    """A candidate's schedule: the one of `configure_optimizers`, for any optimizer with the same groups.

    Strategies that divide an optimizer give the schedule another one to work on.
    """

    def __init__(self, made: Configured) -> None:
        groups = made.optimizer.param_groups
        self._options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self._scheduler = _attached(copy.copy(made.scheduler), None)

    def __call__(self, optimizer: torch.optim.Optimizer) -> Any:
        # torch marks an optimizer that has a schedule, and warns about steps without the mark.
        LambdaLR(optimizer, _one)
        for group, options in zip(optimizer.param_groups, self._options, strict=True):
            group.update(options)
        return _attached(copy.deepcopy(self._scheduler), optimizer)


def _one(_epoch: int) -> float:
    return 1.0


def _attached(scheduler: Any, optimizer: torch.optim.Optimizer | None) -> Any:
    """Attach the schedule, and its parts, to another optimizer."""
    scheduler.optimizer = optimizer
    parts: Sequence[Any] = getattr(scheduler, "_schedulers", ())
    if parts:
        scheduler._schedulers = [_attached(copy.copy(part), optimizer) for part in parts]
    return scheduler
