"""Losses and metrics of classification, regression and language tasks.

Metrics are averaged over batches, weighted by rows; so only metrics are here whose average is the metric of the whole
validation set. The root of a mean is not one: for a regression, `mse` and `r2` rank models as `rmse` would.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
from torch.nn import functional

from hydra_tune.search_spaces.dataset import Data
from hydra_tune.training.candidate import Loss, Metric


def loss(data: Data) -> Loss:
    """Return the training loss of a task."""
    if data.task == "regression":
        return functional.mse_loss
    return token_cross_entropy if data.task == "language" else functional.cross_entropy


def metrics(data: Data) -> Mapping[str, Metric]:
    """Return the metrics of a task, by name; for a regression in the user's units."""
    if data.task == "classification":
        return {"accuracy": accuracy}
    if data.task == "language":
        return {"accuracy": accuracy, "bits": bits_per_token}
    return {
        "r2": functools.partial(r2, variance=data.target_variance),
        "mae": functools.partial(mean_absolute_error, scale=data.target_scale),
        "mse": functools.partial(mean_squared_error, scale=data.target_scale),
    }


def token_cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy over all positions of all rows, for outputs (rows, positions, vocabulary)."""
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the share of rows, or of positions in text, where the largest output is the target."""
    return (outputs.argmax(dim=-1) == targets).float().mean().item()


def bits_per_token(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Return the cross-entropy in bits per symbol of a text."""
    return token_cross_entropy(outputs, targets).item() / math.log(2)


def r2(outputs: torch.Tensor, targets: torch.Tensor, *, variance: float) -> float:
    """Return the share of variance explained; with the whole set's `variance`, batches average exactly."""
    return 1.0 - functional.mse_loss(outputs, targets).item() / variance


def mean_absolute_error(outputs: torch.Tensor, targets: torch.Tensor, *, scale: float) -> float:
    """Return the mean absolute error in the target's units."""
    return functional.l1_loss(outputs, targets).item() * scale


def mean_squared_error(outputs: torch.Tensor, targets: torch.Tensor, *, scale: float) -> float:
    """Return the mean squared error in the target's units."""
    return functional.mse_loss(outputs, targets).item() * scale**2
