"""Training hyperparameters that the families share, and the optimizer for them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution

from hydra_tune.search_spaces.space import OneOf, Param
from hydra_tune.training.candidate import OptimizerFactory

HUGE = 1_000_000
"""Limit of sizes without a natural one, against typing errors."""


def training_params(
    *,
    lr: tuple[float, float],
    optimizers: Sequence[str] = ("adamw",),
    batch_sizes: Sequence[int] = (16, 32, 64),
) -> list[Param]:
    """Return the training parameters of one family; `lr` is the range for AdamW.

    SGD has its own learning rate, since good values are about ten times those of AdamW.
    """
    params = [
        Param("optimizer", CategoricalDistribution(tuple(optimizers))),
        Param("lr", FloatDistribution(*lr, log=True), when=OneOf("optimizer", ("adamw",)), limits=(1e-8, 10.0)),
    ]
    if "sgd" in optimizers:
        sgd = OneOf("optimizer", ("sgd",))
        params += [
            Param("sgd_lr", FloatDistribution(0.02, 0.08, log=True), when=sgd, limits=(1e-8, 10.0)),
            Param("momentum", FloatDistribution(0.8, 0.9), when=sgd, limits=(0.0, 0.9999)),
        ]
    return params + [
        Param("weight_decay", FloatDistribution(1e-6, 1e-2, log=True), limits=(0.0, 1.0)),
        Param("batch_size", CategoricalDistribution(tuple(batch_sizes)), limits=(1, HUGE)),
    ]


def dropout_param(high: float = 0.3) -> Param:
    """Return the parameter for the share of activations dropped in training."""
    return Param("dropout", FloatDistribution(0.0, high), limits=(0.0, 0.95))


def optimizer(params: Mapping[str, Any]) -> OptimizerFactory:
    """Return the optimizer for an assignment of `training_params`."""
    decay = params["weight_decay"]
    if params["optimizer"] == "sgd":
        return functools.partial(
            torch.optim.SGD,
            lr=params["sgd_lr"],
            momentum=params["momentum"],
            weight_decay=decay,
            # Nesterov needs momentum, and an override may set it to zero.
            nesterov=params["momentum"] > 0,
        )
    return functools.partial(torch.optim.AdamW, lr=params["lr"], weight_decay=decay)
