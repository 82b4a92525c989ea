"""The hyperparameters of training that the families share, and the optimizer they stand for."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from optuna.distributions import CategoricalDistribution, FloatDistribution

from hydra_tune.candidate import OptimizerFactory
from hydra_tune.search_spaces.space import OneOf, Param

HUGE = 1_000_000
"""The limit of sizes that have no natural one; it only keeps out slips of the keyboard."""


def training_params(
    *,
    lr: tuple[float, float],
    optimizers: Sequence[str] = ("adamw",),
    batch_sizes: Sequence[int] = (16, 32, 64),
) -> list[Param]:
    """The parameters of training for one family; `lr` is the range for AdamW.

    SGD has a learning rate of its own, since good values are some ten times those of AdamW.
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
    """The share of activations dropped while training."""
    return Param("dropout", FloatDistribution(0.0, high), limits=(0.0, 0.95))


def optimizer(params: Mapping[str, Any]) -> OptimizerFactory:
    """The optimizer that an assignment of `training_params` stands for."""
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
