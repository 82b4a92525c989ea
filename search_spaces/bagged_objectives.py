"""Losses and metrics for models of a table's folds: every row is judged by the model that has not seen it.

Outputs have the shape (rows, folds, members, outputs); the columns of targets are those of `table`. Each function is a
mean over rows, so that batches average exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from hydra_tune.search_spaces.dataset import Task
from hydra_tune.search_spaces.table import FOLD, JUDGED, VALUE, TargetScale
from hydra_tune.training.candidate import Metric


@dataclass(frozen=True)
class BaggedLoss:
    """Mean over rows of the loss of the models that a row trains, or of the one that it judges."""

    task: Task
    scale: TargetScale
    smoothing: float = 0.0
    """Label smoothing, in training only."""
    log: bool = False
    absolute: bool = False

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        weights = taught(targets, outputs.shape[1])
        errors = self._errors(outputs, targets).mean(dim=2)
        return ((errors * weights).sum(dim=1) / weights.sum(dim=1)).mean()

    def _errors(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.task == "classification":
            return self._cross_entropy(outputs, targets)
        wanted = self.scale.towards_model(targets, self.log).unsqueeze(2).expand(outputs.shape[:3])
        difference = functional.smooth_l1_loss if self.absolute else functional.mse_loss
        return difference(outputs.squeeze(3), wanted, reduction="none")

    def _cross_entropy(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        log_probabilities = outputs.log_softmax(dim=-1)
        classes = targets[:, VALUE].long().reshape(-1, 1, 1, 1).expand(*outputs.shape[:3], 1)
        right = -log_probabilities.gather(3, classes).squeeze(3)
        if not self.smoothing:
            return right
        smoothing = self.smoothing * (1 - targets[:, JUDGED]).reshape(-1, 1, 1)
        return (1 - smoothing) * right - smoothing * log_probabilities.mean(dim=3)


def taught(targets: torch.Tensor, folds: int) -> torch.Tensor:
    """Return the weights (rows, folds) of the folds' models: in training all but the row's own, else only its own."""
    own = targets[:, FOLD, None] == torch.arange(folds, device=targets.device)
    judged = targets[:, JUDGED, None] > 0
    return (own == judged).to(targets.dtype)


def answers(outputs: torch.Tensor, task: Task, scale: TargetScale, log: bool = False) -> torch.Tensor:
    """Return each fold's mean answer over members: probabilities, or numbers in user units; (rows, folds, outputs)."""
    if task == "classification":
        return outputs.softmax(dim=-1).mean(dim=2)
    return scale.towards_user(outputs, log).mean(dim=2)


def own_answers(said: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return each row's answer from the fold that has not seen it."""
    fold = targets[:, FOLD].long().reshape(-1, 1, 1).expand(-1, 1, said.shape[2])
    return said.gather(1, fold).squeeze(1)


@dataclass(frozen=True)
class BaggedMetric:
    """A metric of the out-of-fold answers, in the user's units."""

    name: str
    task: Task
    scale: TargetScale
    log: bool = False

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> float:
        own = own_answers(answers(outputs, self.task, self.scale, self.log), targets)
        if self.task == "classification":
            classes = targets[:, VALUE].long()
            if self.name == "accuracy":
                return (own.argmax(dim=1) == classes).float().mean().item()
            return -own.gather(1, classes[:, None]).clamp(min=1e-7).log().mean().item()
        error = own.squeeze(1) - (targets[:, VALUE] * self.scale.scale + self.scale.mean)
        return (error.abs() if self.name == "mae" else error.square()).mean().item()


def bagged_metrics(task: Task, scale: TargetScale, log: bool = False) -> Mapping[str, Metric]:
    """Return the metrics of a task, by name."""
    names = ("log_loss", "accuracy") if task == "classification" else ("mse", "mae")
    return {name: BaggedMetric(name, task, scale, log) for name in names}
