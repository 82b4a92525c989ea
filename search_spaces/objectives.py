"""What a task minimises and measures: the loss and the metrics of classification, regression and language.

Metrics are averaged over batches, weighted by rows; so only those are here for which that is the metric of
the whole validation set. The root of a mean is not among them: for a regression, `mse` and `r2` rank models
as `rmse` would.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
from torch.nn import functional

from hydra_tune.candidate import Loss, Metric
from hydra_tune.search_spaces.dataset import Data


def loss(data: Data) -> Loss:
    """The loss that a task is trained with."""
    if data.task == "regression":
        return functional.mse_loss
    return token_cross_entropy if data.task == "language" else functional.cross_entropy


def metrics(data: Data) -> Mapping[str, Metric]:
    """The metrics of a task, by name. Those of a regression are in the user's units."""
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
    """Cross-entropy over all places of all rows, of outputs (rows, places, vocabulary)."""
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """The share of rows, or of places in text, where the largest output is the target."""
    return (outputs.argmax(dim=-1) == targets).float().mean().item()


def bits_per_token(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Cross-entropy in bits for each symbol of a text."""
    return token_cross_entropy(outputs, targets).item() / math.log(2)


def r2(outputs: torch.Tensor, targets: torch.Tensor, *, variance: float) -> float:
    """The share of variance explained; with the whole set's `variance`, batches average exactly."""
    return 1.0 - functional.mse_loss(outputs, targets).item() / variance


def mean_absolute_error(outputs: torch.Tensor, targets: torch.Tensor, *, scale: float) -> float:
    """How far off a prediction is on average."""
    return functional.l1_loss(outputs, targets).item() * scale


def mean_squared_error(outputs: torch.Tensor, targets: torch.Tensor, *, scale: float) -> float:
    """The mean of the squared errors."""
    return functional.mse_loss(outputs, targets).item() * scale**2
